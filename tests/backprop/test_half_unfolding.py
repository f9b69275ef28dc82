"""Second moments of patches: unfolding along one side gives what unfolding along both gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.backprop import record
from laplace.backprop.layers import conv as conv_rule
from laplace.backprop.layers import half_unfold
from laplace.backprop.layers.conv import Patches, padded
from laplace.backprop.network import NetworkForward

CASES = {
    "five by five": (6, {"kernel_size": 5}, (12, 12)),
    "one channel": (1, {"kernel_size": 5}, (28, 28)),
    "padding": (3, {"kernel_size": 5, "padding": 2}, (9, 13)),
    "dilation": (4, {"kernel_size": 3, "dilation": 2, "padding": 1}, (12, 10)),
    "dilation of one side": (4, {"kernel_size": 3, "dilation": (1, 3)}, (8, 11)),
    "stride across": (4, {"kernel_size": (3, 4), "stride": (1, 2)}, (8, 11)),
    "a column": (4, {"kernel_size": (4, 1)}, (9, 6)),
    "circular": (3, {"kernel_size": 3, "padding": 2, "padding_mode": "circular"}, (7, 7)),
    "same, even": (3, {"kernel_size": 4, "padding": "same"}, (9, 9)),
    "one row in common": (5, {"kernel_size": 4}, (7, 9)),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize(("channels", "options", "size"), CASES.values(), ids=CASES)
def test_half_unfolding_equals_unfolding(channels, options, size, monkeypatch):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 2, **options).double()
    x = torch.randn(7, 1, channels, *size, dtype=torch.float64)
    positions = conv(x[:, 0]).flatten(2).shape[2]
    seen = Patches(conv, x, positions)
    a = seen.read(slice(None))[:, 0]  # (N, I, T)
    expected = torch.einsum("nit,njt->ij", a, a)
    monkeypatch.setattr(half_unfold, "_SMALL", 0)
    assert half_unfold.half_unfolding_pays(conv, padded(conv, x[:, 0]))
    torch.testing.assert_close(seen.gram()[0], expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(4, 4, 3, stride=2), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, (1, 3)), nn.Conv2d(4, 4, 8)],
    ids=["stride", "groups", "one row", "nothing in common"],
)
def test_other_convolutions_are_unfolded(conv):
    assert not half_unfold.half_unfolding_pays(conv, torch.zeros(500, 4, 10, 10))


def fitted_with_room_for(numbers, monkeypatch, unfolded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 36, 8)).double()
    data = [(torch.randn(6, 2, 8, 8, dtype=torch.float64), torch.randint(8, (6,))) for _ in range(3)]
    monkeypatch.setattr(record, "_KEPT", numbers)
    monkeypatch.setattr(NetworkForward, "_batched", lambda self, k: False)
    unfolded.clear()
    return Laplace(model, "classification", "all", "diag").fit(data)


def test_patches_are_unfolded_once_for_all_vectors_where_there_is_room(monkeypatch):
    unfolded: list[int] = []
    own = conv_rule.patches
    monkeypatch.setattr(conv_rule, "patches", lambda *args: unfolded.append(1) or own(*args))
    without = fitted_with_room_for(0, monkeypatch, unfolded)
    often = len(unfolded)
    kept = fitted_with_room_for(2**22, monkeypatch, unfolded)
    assert len(unfolded) < often / 2
    torch.testing.assert_close(kept.H, without.H, rtol=1e-13, atol=0)
