"""The last layer is found by running one example, at any depth, through wrappers; or the error says what was found."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import LaplaceWarning, ModelError, OptionError
from networks import cut, make


def names(la):
    return list(la.posterior.fit.layout.names)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("mlp", ["2.weight", "2.bias"]),
        ("wrapped", ["inner.head.1.weight", "inner.head.1.bias"]),
        ("residual", ["classifier.weight"]),
        ("conv", ["fc.weight", "fc.bias"]),
    ],
)
def test_it_is_found_at_any_depth(network, expected):
    model, x, y = make(network, "classification")
    assert names(Laplace(model, "classification").fit(cut(x, y, 8))) == expected


def test_it_is_found_through_a_compiled_wrapper_and_data_parallel():
    model, x, y = make("mlp", "classification")
    plain = Laplace(model, "classification").fit(cut(x, y, 8))
    for wrapper in (torch.compile(model), nn.DataParallel(model)):
        la = Laplace(wrapper, "classification").fit(cut(x, y, 8))
        torch.testing.assert_close(la(x), plain(x))


class Sequence(nn.Module):
    """A head applied to every position, of which the network returns a reduction."""

    def __init__(self, how):
        super().__init__()
        self.body, self.head, self.how = nn.Linear(3, 5), nn.Linear(5, 2), how

    def forward(self, x):
        return self.how(self.head(torch.tanh(self.body(x))))


WAYS = {"pick_first": lambda o: o[:, 0], "pick_last": lambda o: o[:, -1], "average": lambda o: o.mean(1)}


@pytest.mark.parametrize("way", list(WAYS))
def test_feature_reduction_is_what_the_network_does_after_its_head(way):
    torch.manual_seed(0)
    model = Sequence(WAYS[way]).double()
    x, y = torch.randn(12, 4, 3, dtype=torch.float64), torch.randint(2, (12,))
    la = Laplace(model, "classification", feature_reduction=way, hessian_structure="full").fit(cut(x, y, 5))
    phi = WAYS[way](torch.tanh(model.body(x))).detach()
    flat = nn.Sequential(model.head)
    same = Laplace(flat, "classification", hessian_structure="full").fit(cut(phi, y, 5))
    torch.testing.assert_close(la.H, same.H)
    torch.testing.assert_close(la(x), same(phi))
    with pytest.warns(LaplaceWarning, match=f"feature_reduction='{way}'"):
        found = Laplace(model, "classification", hessian_structure="full").fit(cut(x, y, 5))
    torch.testing.assert_close(found.H, same.H)


class Padded(nn.Module):
    """Picks the last token of each row that is none of the padding, as decoders do."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, outputs)

    def last(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids != 0).sum(1) - 1

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(ids))[0][torch.arange(len(ids)), self.last(ids)]

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))[0])[torch.arange(len(ids)), self.last(ids)]


def padded_ids() -> torch.Tensor:
    ids = torch.randint(1, 9, (12, 6))
    for i in range(12):
        ids[i, 1 + i % 6 :] = 0
    ids[3, 2] = ids[3, 1]
    return ids


@pytest.mark.parametrize("head", ["trained", "zero"])
@pytest.mark.parametrize("outputs", [2, 20])
@pytest.mark.parametrize("given", ["pick_last", None])
def test_pick_last_is_the_last_token_of_each_row_that_is_no_padding(given, outputs, head):
    torch.manual_seed(0)
    model, ids, y = Padded(outputs).double(), padded_ids(), torch.randint(2, (12,))
    if head == "zero":  # all positions have the same outputs, and other features
        nn.init.zeros_(model.head.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        la = Laplace(model, "classification", feature_reduction=given, hessian_structure="full").fit(cut(ids, y, 5))
    phi = model.features(ids).detach()
    same = Laplace(nn.Sequential(model.head), "classification", hessian_structure="full").fit(cut(phi, y, 5))
    torch.testing.assert_close(la.H, same.H)
    torch.testing.assert_close(la(ids), same(phi))


def test_a_wrong_feature_reduction_is_an_error():
    model = Sequence(WAYS["average"])
    with pytest.raises(ModelError, match=r"not the output of an nn\.Linear"):
        Laplace(model, "classification", feature_reduction="pick_first").fit(
            [(torch.randn(4, 3, 3), torch.zeros(4, dtype=torch.long))]
        )
    with pytest.raises(OptionError, match=r"feature_reduction='max'.*'pick_first', 'pick_last', 'average'"):
        Laplace(model, "classification", feature_reduction="max").fit(
            [(torch.randn(4, 3, 3), torch.zeros(4, dtype=torch.long))]
        )


def test_it_can_be_named_and_a_wrong_name_lists_the_right_ones():
    model, x, y = make("mlp", "classification")
    assert names(Laplace(model, "classification", last_layer_name="2").fit(cut(x, y, 8))) == ["2.weight", "2.bias"]
    with pytest.raises(OptionError, match=r"'head' is not a module.*\['0', '2'\]"):
        Laplace(model, "classification", last_layer_name="head").fit(cut(x, y, 8))
    with pytest.raises(OptionError, match=r"'1' is a Tanh.*\['0', '2'\]"):
        Laplace(model, "classification", last_layer_name="1").fit(cut(x, y, 8))
    with pytest.raises(ModelError, match="'0' is not the network's output"):
        Laplace(model, "classification", last_layer_name="0").fit(cut(x, y, 8))


@pytest.mark.parametrize("last", [nn.Softmax(-1), nn.ReLU(), nn.ReLU(inplace=True), nn.LayerNorm(3)])
def test_something_after_the_linear_layer_is_an_error_that_says_what_to_do(last):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), last)
    data = [(torch.randn(6, 4), torch.zeros(6, dtype=torch.long))]
    with pytest.raises(ModelError, match=r"'0'.*Return the layer's output itself"):
        Laplace(model, "classification").fit(data)


def test_a_late_change_of_the_output_is_noticed_on_the_batch_where_it_happens():
    class Rectified(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            nn.init.eye_(self.fc.weight)
            nn.init.zeros_(self.fc.bias)

        def forward(self, x):
            return self.fc(x).relu()

    x = torch.rand(8, 2)
    x[5] = -1  # the first examples pass the ReLU unchanged
    with pytest.raises(ModelError, match="something changes it on the way"):
        Laplace(Rectified(), "classification").fit(cut(x, torch.zeros(8, dtype=torch.long), 2))


def test_a_network_without_a_linear_layer_is_an_error():
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten())
    with pytest.raises(ModelError, match=r"called no nn\.Linear"):
        Laplace(model, "classification").fit([(torch.randn(3, 1, 3), torch.zeros(3, dtype=torch.long))])


def test_a_head_called_twice_is_an_error():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.fc(x).tanh())

    with pytest.raises(ModelError, match="called 2 times"):
        Laplace(Twice(), "classification").fit([(torch.randn(3, 3), torch.zeros(3, dtype=torch.long))])


def test_frozen_tensors_are_left_out_and_a_frozen_head_is_taken_whole():
    model, x, y = make("mlp", "classification")
    model[2].bias.requires_grad_(False)
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    assert names(la) == ["2.weight"]
    assert la(x).shape == (23, 3)
    model[2].weight.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    la = Laplace(model, "classification", hessian_structure="full").fit(cut(x, y, 8))
    assert names(la) == ["2.bias"]
    assert la(x).shape == (23, 3)
    model.requires_grad_(False)
    with pytest.warns(LaplaceWarning, match="requires_grad=False"):
        assert names(Laplace(model, "classification").fit(cut(x, y, 8))) == ["2.weight", "2.bias"]


def test_a_computed_weight_and_another_forward_are_refused():
    _, x, y = make("mlp", "classification")
    normed = nn.Sequential(nn.Linear(4, 7), nn.utils.parametrizations.weight_norm(nn.Linear(7, 3))).double()
    with pytest.raises(ModelError, match="not a parameter but computed"):
        Laplace(normed, "classification").fit(cut(x, y, 8))

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ModelError, match="does not compute weight x"):
        Laplace(nn.Sequential(Doubled(4, 3)).double(), "classification").fit(cut(x, y, 8))


def test_a_head_that_lost_its_bias_is_an_error_that_says_so():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    model[2] = nn.Linear(7, 3, bias=False).double()
    with pytest.raises(ModelError, match=r"no longer has 2\.weight, 2\.bias"):
        la(x)
