"""How much is written out at a time is what the budget allows, whatever is asked of whatever kind of gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace.backprop.activations import Stored
from laplace.backprop.entries import Entries, at
from laplace.backprop.outer import Outer
from laplace.backprop.uses import DenseUse, SumUse
from laplace.structures.functional.points import Points

K, N, ROWS, COLUMNS = 3, 20, 5, 7


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(made) if isinstance(t, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return made


def outer(positions: int = 1) -> Outer:
    torch.manual_seed(0)
    return Outer(Stored(torch.randn(N, 1, COLUMNS, positions).double()), torch.randn(K, N, 1, ROWS, positions).double())


def test_sending_many_steps_back_is_cut():
    use, coefficients = outer(), torch.randn(400, N, K).double()
    expected = use.back(coefficients)
    with Largest() as made:
        found = use.within(1000).back(coefficients)
    torch.testing.assert_close(found, expected)
    assert made.numbers <= 400 * ROWS * COLUMNS  # what is asked for; sent at once it would be 400 * N * ROWS


def test_entries_count_the_product_that_they_are_taken_from():
    whole, index = outer(positions=4), torch.arange(0, ROWS * COLUMNS, 2)
    use = at(whole, index).within(3000)
    with Largest() as made:
        found = use.contracted(slice(None))
    torch.testing.assert_close(found, whole.contracted(slice(None))[..., index])
    assert made.numbers <= 3000  # all examples' products are K * N * ROWS * COLUMNS = 2100 beside their factors
    assert use._width * N > 3000


def test_what_is_made_of_a_use_keeps_its_chunk():
    dense, entries = DenseUse(torch.randn(K, N, 2)), at(outer(4), torch.tensor([0, 5]))
    both = SumUse([dense, entries])
    for use in (dense, outer(), entries, both):
        use.within(123)
        for made in (use.double(), use.settled(slice(0, 2))):
            assert made.chunk == 123
    assert [part.chunk for part in both.double().uses] == [123, 123]
    assert isinstance(entries, Entries)


def test_what_is_kept_counts_the_inputs_of_layers():
    wide = Outer(Stored(torch.zeros(N, 1, 1000, 1)), torch.zeros(1, N, 1, 2, 1))
    assert wide.nbytes == 4 * N * (1000 + 2)
    assert SumUse([wide, wide]).nbytes == 2 * wide.nbytes
    assert at(wide, torch.tensor([0])).nbytes == wide.nbytes
    limit = 2 * 4 * N * 2  # room for g twice

    class Engine:
        def chunks(self, inputs, n_outputs):
            yield inputs

        def forward(self, inputs):
            return self

        outputs = torch.zeros(N, 2)

        def sent(self, v):
            return [wide]

    class Part:
        inputs, y = None, torch.zeros(N, 1, 2)

    points = Points([Part()], torch.arange(N))
    list(points.gradients(Engine(), limit))
    assert not points._held
    list(points.gradients(Engine(), 10**6))
    assert points._held
