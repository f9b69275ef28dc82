"""`FeatureExtractor` finds the last layer and returns its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace.errors import ModelError, OptionError
from laplace.utils import FeatureExtractor


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.body = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def test_features_are_the_inputs_of_the_layer_that_runs_last():
    model, x = HeadFirst(), torch.randn(5, 3)
    extractor = FeatureExtractor(model)
    assert extractor.last_layer is None
    out, phi = extractor.forward_with_features(x)
    assert extractor.last_layer is model.head
    assert extractor.last_layer_name == "head"
    torch.testing.assert_close(out, model(x))
    torch.testing.assert_close(model.head(phi), out)
    assert not phi.requires_grad
    assert FeatureExtractor(model, enable_backprop=True).forward_with_features(x)[1].requires_grad
    assert not model.head._forward_pre_hooks
    assert not model.head._forward_hooks


@pytest.mark.parametrize(("reduction", "index"), [("pick_first", 0), ("pick_last", -1), ("average", None)])
def test_sequences_are_reduced(reduction, index):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 6, 3)
    _, phi = FeatureExtractor(model, feature_reduction=reduction).forward_with_features(x)
    features = model[:2](x)
    torch.testing.assert_close(phi, features.mean(1) if index is None else features[:, index])


def test_the_state_names_each_weight_once():
    model = HeadFirst()
    extractor = FeatureExtractor(model, "head")
    assert set(extractor.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    twice = dict(extractor.state_dict()) | {"last_layer.weight": model.head.weight.detach().clone()}
    extractor.load_state_dict(twice)
    with pytest.raises(RuntimeError, match=r"last_layer\.weight"):
        extractor.load_state_dict(twice | {"last_layer.weight": model.head.weight.detach() + 1})


def test_what_cannot_be_is_refused():
    with pytest.raises(OptionError, match="pick_first"):
        FeatureExtractor(HeadFirst(), feature_reduction="max")
    with pytest.raises(OptionError, match="there is none"):
        FeatureExtractor(HeadFirst(), "neck")
    with pytest.raises(ModelError, match="last_layer_name"):
        FeatureExtractor(nn.Tanh())(torch.randn(2, 3))
