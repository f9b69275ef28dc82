"""Options of one's own parts are printed, saved and compared; what does not fit them is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from laplace import Categorical, Laplace
from laplace.errors import CheckpointError, InputError, LaplaceError, OptionError, UnsupportedError
from laplace.likelihoods import ByAutograd, from_log_prob
from laplace.structures import BlockDiagonal, DiagBlock
from laplace.weights import Choice, Layout, Selection


class NegativeBinomial(ByAutograd):
    """Counts with mean exp(f) and r failures."""

    options = ("r",)

    def __init__(self, r=1.0):
        self.r = r

    def log_prob(self, f, y, sigma=1.0):
        return (y * f - (y + self.r) * (f.exp() + self.r).log()).sum(-1)


class ByMapping(NegativeBinomial):
    options = property(lambda self: {"r": self.r})


def data():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(60, 3), torch.rand(60, 1) * 5


@pytest.mark.parametrize("made", [NegativeBinomial, ByMapping])
def test_a_likelihoods_options_are_printed_and_compared(made, tmp_path):
    model, x, y = data()
    la = Laplace(model, made(3.0)).fit([(x, y)])
    assert repr(la.likelihood) == f"{made.__name__}(r=3.0)"
    assert f"{made.__name__}(r=3.0)" in repr(la)
    assert repr(made()) == f"{made.__name__}()"
    la.save(tmp_path / "mine")
    assert torch.equal(Laplace.load(tmp_path / "mine", model, likelihood=made(3.0))(x)[1], la(x)[1])
    with pytest.raises(CheckpointError, match=r"\(r=3.0\).*\(r=9.0\)"):
        Laplace.load(tmp_path / "mine", model, likelihood=made(9.0))
    with pytest.raises(LaplaceError, match=r"r=3.0.*r=9.0"):
        la + Laplace(model, made(9.0)).fit([(x, y)])


def test_a_subclass_of_a_likelihood_goes_by_its_own_name(tmp_path):
    class Doubled(Categorical):
        def log_prob(self, f, y, sigma=1.0):
            return 2 * super().log_prob(f, y)

    model, x, y = nn.Linear(3, 2), torch.randn(9, 3), torch.arange(9) % 2
    la, usual = (Laplace(model, likelihood).fit([(x, y)]) for likelihood in (Doubled(), Categorical()))
    assert "likelihood  Doubled" in repr(la)
    with pytest.raises(LaplaceError, match="Doubled and classification"):
        la + usual
    la.save(tmp_path / "mine")
    usual.save(tmp_path / "usual")
    with pytest.raises(CheckpointError, match="your own likelihood, 'Doubled'"):
        Laplace.load(tmp_path / "mine", model)
    for path, likelihood in (("mine", Categorical()), ("usual", Doubled())):
        with pytest.raises(CheckpointError, match="Pass the likelihood that it was fitted with"):
            Laplace.load(tmp_path / path, model, likelihood=likelihood)
    again = Laplace.load(tmp_path / "mine", model, likelihood=Doubled())
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    again.load_state_dict(la.state_dict() | {"likelihood": "classification"})  # as earlier states have it
    with pytest.raises(LaplaceError, match=r"Doubled.*Make it with the same options"):
        Laplace(model, Categorical()).load_state_dict(la.state_dict())


def test_a_subset_names_its_options_likewise():
    class Ending(Choice):
        label, options = "ending", ("end",)

        def __init__(self, end):
            self.end = end

        def select(self, model):
            return Selection(Layout.of((n, p) for n, p in model.named_parameters() if n.endswith(self.end)))

    assert repr(Ending("bias")) == "Ending(end='bias')"
    assert Ending("bias") != Ending("weight")


def test_a_subset_may_be_a_dataclass_that_is_given_its_label():
    @dataclass(eq=False)
    class Holding(Choice):
        label: str
        words: list[str]

        def select(self, model):
            pairs = ((n, p) for n, p in model.named_parameters() if any(word in n for word in self.words))
            return Selection(Layout.of(pairs))

    class Unlabelled(Choice):
        def select(self, model):
            return Selection(Layout.of(model.named_parameters()))

    assert Holding("biases", ["bias"]).label == "biases"
    assert Unlabelled().label == "Unlabelled"


class Forgetful(BlockDiagonal):
    options = ("floor",)

    def __init__(self, floor=0.0):
        self.level = floor

    def block_sums(self, moments):
        return {"fisher": moments.squares()}

    def block(self, sums, shape, eigh):
        return DiagBlock(sums["fisher"].to(eigh.dtype), shape)


def test_an_option_that_is_no_attribute_is_named():
    model, _, _ = data()
    with pytest.raises(OptionError, match=r"Forgetful.options has 'floor'.*self.floor = floor"):
        Laplace(model, "regression", "all", Forgetful())

    class Wordy(NegativeBinomial):
        options = "r"

    with pytest.raises(OptionError, match=r"must be a tuple of names"):
        Laplace(model, Wordy())


def test_a_structure_of_ones_own_gets_whole_tensors_unless_it_says_otherwise():
    class Rows(Forgetful):
        options = ()

    class Single(Rows):
        scattered = True

    model, x, y = data()
    options = {"subnetwork_indices": torch.tensor([0, 5, 7])}
    with pytest.raises(UnsupportedError, match=r"'Rows' needs whole tensors.*scattered = True"):
        Laplace(model, "regression", "subnetwork", Rows(), **options)
    assert Laplace(model, "regression", "subnetwork", Single(), **options).fit([(x, y)]).H.shape == (3,)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_labels_that_are_broadcast_against_the_outputs_are_refused(reduce):
    model, x, y = data()

    def log_prob(f, y):
        return -reduce((y - f).square(), -1)

    class Own(ByAutograd):
        def log_prob(self, f, y, sigma=1.0):
            return log_prob(f, y)

    for likelihood in (from_log_prob(log_prob), Own()):
        with pytest.raises(InputError, match=r"depends on other examples.*\(60,\).*\(60, 1\).*y.unsqueeze\(-1\)"):
            Laplace(model, likelihood).fit([(x, y[:, 0])])
        with pytest.raises(InputError, match="depends on other examples"):
            Laplace(model, likelihood).fit([(x[:2], y[:2, 0])])
        assert Laplace(model, likelihood).fit([(x, y)]).log_marginal_likelihood().isfinite()
        assert Laplace(model, likelihood).fit([(x[:1], y[:1])]).log_marginal_likelihood().isfinite()
    centred = from_log_prob(lambda f, y: -(y - f + f.mean()).square().sum(-1))
    with pytest.raises(InputError, match="same row of outputs and labels"):
        Laplace(model, centred).fit([(x, y)])


def test_a_choice_that_does_not_fit_the_network_is_refused_at_once():
    model, _, _ = data()
    named = dict(model.named_parameters())

    class Chosen(Choice):
        def __init__(self, found):
            self.found = found

        def select(self, model):
            return self.found

    def of(*names):
        return Selection(Layout.of((name, named[name]) for name in names))

    def wrong(name, shape):
        return Selection(Layout((name,), (shape,)))

    for found, words in [
        (None, r"Chosen.select returned None; a Selection is needed: Selection\(Layout.of\(pairs\)\)"),
        (of("0.weight").layout, r"returned Layout\(.*; a Selection is needed"),
        (of(), "chose no weights"),
        (of("0.weight", "2.bias", "0.weight"), "chose '0.weight' twice"),
        (wrong("0.wieght", (4, 3)), r"'0.wieght', which is no parameter of the network. Did you mean '0.weight'"),
        (wrong("0.weight", (3, 4)), r"has '0.weight' as \(3, 4\); the parameter has shape \(4, 3\)"),
    ]:
        with pytest.raises(OptionError, match=words):
            Laplace(model, "regression", Chosen(found))
    assert "weights     Chosen" in repr(Laplace(model, "regression", Chosen(of("2.bias"))))
