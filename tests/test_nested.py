"""Values with tensors inside keep their types and are not written to."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from laplace.network.pytree import map_tensors, replace_tensors, tensors_in

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Box:
    tensor: Tensor
    made: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.made = self.tensor + 1


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    name: str


def one() -> Tensor:
    return torch.ones(2)


VALUES = [
    one(),
    (one(), 3, None),
    [one(), "text"],
    Pair(one(), {"inner": one()}),
    {"a": one(), "b": [one()]},
    OrderedDict(a=one()),
    defaultdict(list, a=one()),
    UserDict(a=one(), b=2),
    Box(one()),
    Frozen(one(), "name"),
    {"box": Box(one())},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_tensor_is_found_and_replaced(value):
    before = [t.clone() for t in tensors_in(value)]
    assert before
    mapped = map_tensors(value, lambda t: 5 * t)
    assert type(mapped) is type(value)
    assert all(torch.equal(5 * b, t) for b, t in zip(before, tensors_in(mapped), strict=True))
    assert all(torch.equal(b, t) for b, t in zip(before, tensors_in(value), strict=True))
    others = [torch.full((1,), float(i)) for i in range(len(before))]
    assert [float(t) for t in tensors_in(replace_tensors(value, iter(others)))] == list(range(len(before)))


def test_a_mapping_that_cannot_be_written_to_becomes_a_dict():
    assert map_tensors(MappingProxyType({"a": one(), "b": 1}), torch.neg)["b"] == 1


@pytest.mark.parametrize("value", [3, "text", None, Box, object()], ids=["number", "text", "none", "class", "object"])
def test_what_holds_no_tensor_is_the_same_object(value):
    assert tensors_in(value) == []
    assert map_tensors(value, torch.neg) is value
