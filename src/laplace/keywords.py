"""Refuse wrong keywords by name, and say which one is meant. Type checkers see each signature as it was written.

Constructors of parts check names alone (`NamedOptions`), because copies of a part are made without arguments. Calls
and the constructors that users begin with check all arguments (`refuse_unknown_keywords`, `checked_before`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from torch import nn

from laplace.checks import did_you_mean
from laplace.errors import ArgumentError, ModelError

_NEAR: Final = 0.75  # how like one of our keywords a keyword of the network may be, if no forward names it
_ELSEWHERE: Final = {  # keywords that are looked for where they are not, and what to write
    "collate_fn": "DataLoader(dataset, batch_size=32, collate_fn=...), and give that",
    "outputs": (
        "Laplace(AnswerTokens(model, token_ids), ...), from laplace.integrations.huggingface, if the logits of some "
        "tokens alone are meant"
    ),
}

P = ParamSpec("P")
R = TypeVar("R")


def refuse_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a call with a wrong keyword, or without a needed argument, into an error that says what to write.

    Type checkers see the function's own signature, so that they find the typo, too. If it ends with
    `**options: Unpack[...]`, the keys of that TypedDict are allowed. If it ends with `**model_kwargs`, these go to the
    network, and are refused once the network does not take them.
    """
    return _checked(function, _Call(function))


def refuse_unknown_keywords_of(owner: str, instead: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return the same decorator for a function that users call by the name `owner`, not on a `Laplace`.

    Args:
        owner: The function as users write it.
        instead: What to write for some unknown keywords.
    """
    return lambda function: _checked(function, _Call(function, owner, instead))


def _checked(function: Callable[P, R], call: _Call) -> Callable[P, R]:
    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        strange = call.strange(kwargs) if kwargs else []
        if strange:
            call.refuse_near(strange, args)
        try:
            return function(*args, **kwargs)
        except (ModelError, TypeError) as error:
            if isinstance(error, TypeError):
                call.check(args, kwargs)
            for name in strange:
                if f"unexpected keyword argument {name!r}" in str(error):
                    raise call.refused(name, ", and the network takes no such keyword") from error
            raise

    return checked


def checked_before(function: Callable[..., None], owner: str = "") -> Callable[..., Any]:
    """Return a `__new__` that refuses the same for `__init__`, which stays the function that was written.

    So libraries that read the names of its arguments find them. Copies and pickles, which call it without arguments,
    are made without a check. `owner` is the class in messages, where that of the function is a base class.
    """
    call = _Call(function)
    call.owner = owner or call.owner

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and cls.__init__ is function:
            call.check((cls, *args), kwargs)
        return object.__new__(cls)

    vars(__new__)["__signature__"] = inspect.signature(function)
    return __new__


class _Call:
    """Knows the arguments of a function, and words the error about wrong ones."""

    def __init__(
        self, function: Callable[..., Any], owner: str | None = None, instead: Mapping[str, str] | None = None
    ) -> None:
        self.instead = _ELSEWHERE | dict(instead or {})
        self.signature = inspect.signature(function)
        parameters = list(self.signature.parameters.values())
        self.known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        further = [str(p.annotation) for p in parameters if p.kind is p.VAR_KEYWORD]
        self.passed_on = "Any" in further
        self.known |= {key for annotation in further if annotation != "Any" for key in _unpacked(function, annotation)}
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        self.needed = [name for name in needed if name not in ("self", "cls")]
        self.owner = function.__qualname__.removesuffix(".__init__")
        if owner is not None:
            self.owner, self.needed = owner, [p.name for p in parameters if p.default is p.empty]
        elif parameters[0].kind is inspect.Parameter.POSITIONAL_ONLY:  # a function that is bound to the class
            self.owner = f"Laplace.{self.owner}" if self.owner != "call" else "Laplace.__call__"

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call with wrong arguments."""
        self.strange(kwargs)
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            write = f"Write {self.owner}({', '.join(self.needed)}); see help({self.owner})."
            if "too many positional" in str(error) and self.needed[:1] == ["val_loader"]:
                write = f"For inputs and labels write la.{self.owner.rpartition('.')[2]}((x, y)). {write}"
            raise ArgumentError(f"{self.owner}: {error}. {write}") from None

    def strange(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Return the keywords that go to the network. Refuse others that are not known."""
        strange = [name for name in kwargs if name not in self.known]
        if strange and not self.passed_on:
            raise self.refused(strange[0])
        return strange

    def refuse_near(self, strange: Sequence[str], args: tuple[Any, ...]) -> None:
        """Refuse keywords that look like ours, if a network would swallow them in the `**kwargs` of its forward."""
        network = getattr(args[0], "model", None) if args else None
        near = [name for name in strange if did_you_mean(name, sorted(self.known), _NEAR)]
        if not near or not isinstance(network, nn.Module) or not _swallows(network):
            return
        named = set[str]().union(*(_arguments(module) for module in network.modules()))
        for name in near:
            if name not in named:
                inside = f" (If the network takes it, give it in the mapping: la({{**batch, {name!r}: ...}}).)"
                error = self.refused(name, ", and no forward of the network names such a keyword")
                raise ArgumentError(f"{error}{inside}")

    def refused(self, name: str, where: str = "") -> ArgumentError:
        """Return the error about an unknown keyword."""
        near = did_you_mean(name, sorted(self.known - {"self"})) or f" See help({self.owner})."
        hint = f" Write {self.instead[name]}." if name in self.instead else near
        return ArgumentError(f"{self.owner} has no option {name!r}{where}.{hint}")


def _arguments(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward that is no function of Python
        return {}


def _swallows(network: nn.Module) -> bool:
    """Return whether a network's forward takes any keyword."""
    return any(p.kind is p.VAR_KEYWORD for p in _arguments(network).values())


def _unpacked(function: Callable[..., Any], annotation: str) -> Iterable[str]:
    """Return the keys of the TypedDict in `Unpack[...]`, by its name in the module of the function."""
    name = annotation.removeprefix("Unpack[").removesuffix("]")
    return getattr(sys.modules[function.__module__], name).__annotations__


class _Signature:
    """Is the signature of a class: that of its `__init__`, which a `__new__` would hide."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        whole = inspect.signature(owner.__init__)
        own = owner.__init__ is not object.__init__
        return whole.replace(parameters=list(whole.parameters.values())[1:] if own else [])


class NamedOptions:
    """Makes the constructor of a part refuse an unknown keyword, and name the nearest one.

    Type checkers see the constructor as it was written, so that they find the typo, too.
    """

    if not TYPE_CHECKING:
        __signature__ = _Signature()

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            _refuse_unknown(kwargs, cls.__init__, cls.__name__)
            return super().__new__(cls)


def named_options(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function refuse an unknown keyword likewise."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        _refuse_unknown(kwargs, function, function.__name__)
        return function(*args, **kwargs)

    return checked


def _refuse_unknown(kwargs: Mapping[str, Any], function: Any, called: str) -> None:
    if kwargs and (known := _keywords_of(function)) is not None:
        for name in kwargs:
            if name not in known:
                hint = did_you_mean(name, known) or f" See help({called})."
                raise ArgumentError(f"{called} has no option {name!r}.{hint}")


@cache
def _keywords_of(function: Any) -> list[str] | None:
    """Return the keywords that a function or a constructor takes. None if it takes any."""
    if function is object.__init__:
        return []
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named[1:] if function.__name__ == "__init__" else named
