"""The family of errors is documented as a whole, and what messages list is what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from laplace import errors
from laplace.compat import enums
from laplace.curvature import CURVATURES
from laplace.likelihoods import LIKELIHOODS
from laplace.structures import STRUCTURES, adding, per_weight

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def test_every_error_and_warning_has_a_row_with_what_to_do():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    classes = {name: c for name, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    documented = dict(rows)
    assert {name for name in classes if name != "LaplaceError"} == documented.keys()
    for name, row in documented.items():
        parent = re.match(r" `(\w+)` \|", row)
        if parent:
            assert parent[1] in [base.__name__ for base in classes[name].__mro__]
    assert all(issubclass(c, (errors.LaplaceError, errors.LaplaceWarning)) for c in classes.values())


def test_the_enums_have_what_the_registries_have():
    pairs = [
        (enums.HessianStructure, {*STRUCTURES, "gp"}),
        (enums.Curvature, {*CURVATURES}),
        (enums.Likelihood, {*LIKELIHOODS}),
    ]
    for names, registry in pairs:
        assert {name.value for name in names} == registry


def test_messages_list_the_structures_that_can():
    assert adding() == "'full', 'kron', 'diag' or 'block'"
    assert per_weight() == "'full', 'diag', 'block', 'inf' or 'lowrank'"
