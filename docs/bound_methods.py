"""An extension of griffe: show functions that a class binds as its methods, `reads(function)` and
`holds(function, change)` as its properties, and `classmethod(function)` as its class methods.

`Laplace.predict = predicting.predict` is an attribute to a parser. Here it becomes a method with the function's
arguments but the first, which is the object itself.
"""

from __future__ import annotations

from typing import Any

import griffe

OWNERS = ("laplace.Laplace", "rivals.base.Rival")  # classes that bind functions


class BoundMethods(griffe.Extension):
    """Replace attributes of `OWNERS` that are functions of other modules."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Look at the classes once the whole package is known."""
        if pkg.name != "laplace":
            return
        for path in OWNERS:
            _bind(pkg, pkg[path])


def _bind(pkg: griffe.Module, owner: Any) -> None:
    for name, member in list(owner.members.items()):
        if not isinstance(member, griffe.Attribute) or member.value is None:
            continue
        how = str(member.value.function) if isinstance(member.value, griffe.ExprCall) else ""
        expression = member.value.arguments[0] if how else member.value  # type: ignore[union-attr]
        function = _function(pkg, expression)
        if function is not None:
            is_property = how in ("reads", "holds")
            made = _property(name, function) if is_property else _method(name, function, how == "classmethod")
            made.parent, made.lineno, made.endlineno = owner, member.lineno, member.endlineno
            owner.set_member(name, made)


def _function(pkg: griffe.Module, expression: Any) -> griffe.Function | None:
    """Return the function that an expression names, wherever in the package it is."""
    path = getattr(expression, "canonical_path", "")
    if not path.startswith("laplace."):
        return None
    try:
        found = pkg[path.removeprefix("laplace.")]
        found = found.final_target if found.is_alias else found
    except (KeyError, griffe.GriffeError):
        return None
    return found if isinstance(found, griffe.Function) else None


def _method(name: str, function: griffe.Function, of_class: bool) -> griffe.Function:
    _, *others = function.parameters
    first = griffe.Parameter("cls" if of_class else "self", kind=griffe.ParameterKind.positional_or_keyword)
    parameters = griffe.Parameters(first, *others)
    made = griffe.Function(name, parameters=parameters, returns=function.returns, docstring=function.docstring)
    if of_class:
        made.labels.add("classmethod")
    return made


def _property(name: str, function: griffe.Function) -> griffe.Attribute:
    made = griffe.Attribute(name, annotation=function.returns, docstring=function.docstring)
    made.labels.add("property")
    return made
