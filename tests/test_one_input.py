"""The short way to the prediction of one input gives the numbers of the general way, and steps aside for it."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

import laplace.inference.predict as predicting
from laplace import Laplace
from laplace.errors import InputError, ModelError

N, INPUTS, CLASSES = 30, 4, 3
LINKS = ["probit", "one_vs_rest"]


class Net(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, CLASSES))


class Copied(Net):
    """Returns a copy of its last layer's output."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clone()


class Greedy(Net):
    """Writes to its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mul_(2))


def fitted(network=Net, structure="kron", dtype=torch.float64, **options) -> tuple[Laplace, Tensor]:
    torch.manual_seed(0)
    model, x = network().to(dtype), 2 * torch.randn(N, INPUTS, dtype=dtype)
    la = Laplace(model, "classification", "last_layer", structure, **options)
    return la.fit([(x, torch.randint(CLASSES, (N,)))]), x


@pytest.fixture
def short(monkeypatch) -> list[bool]:
    """Whether each prediction went the short way."""
    taken: list[bool] = []
    way = predicting.at_one_input

    def watched(*args, **kwargs):
        found = way(*args, **kwargs)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(predicting, "at_one_input", watched)
    return taken


@pytest.mark.parametrize("link", [None, *LINKS])
@pytest.mark.parametrize("structure", ["kron", "diag", "ekfac"])
def test_one_input_is_predicted_as_in_a_batch(structure, link, short):
    la, x = fitted(structure=structure, softmax_temperature=1.7)
    together, prediction = la(x, link_approx=link), la.predict(x, link_approx=link)
    short.clear()
    for i in range(5):
        one = x[i : i + 1]
        torch.testing.assert_close(la(one, link_approx=link), together[i : i + 1])
        found, expected = la.predict(one, link_approx=link), prediction[i]
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.outputs.mean, expected.outputs.mean)
        torch.testing.assert_close(found.outputs.covariance, expected.outputs.covariance)
        torch.testing.assert_close(found.outputs.contrasts.variance, expected.outputs.contrasts.variance)
        torch.testing.assert_close(found.distribution.probs, expected.distribution.probs)
        torch.testing.assert_close(found.epistemic, expected.epistemic)
        torch.testing.assert_close(found.aleatoric, expected.aleatoric)
        assert torch.equal(found.label, expected.label)
    assert short == 10 * [True]


@pytest.mark.parametrize("link", LINKS)
def test_it_agrees_with_the_module_in_single_precision(link, short):
    la, x = fitted(dtype=torch.float32)
    module = la.module(link, "mean")
    la(x)
    for i in range(5):
        one = x[i : i + 1]
        torch.testing.assert_close(la(one, link_approx=link), module(one), rtol=0, atol=1e-6)
        torch.testing.assert_close(la.predict(one, link_approx=link).mean, module(x)[i : i + 1], rtol=0, atol=1e-6)
    assert all(short[1:])


def test_what_changes_the_posterior_reaches_the_next_prediction(short):
    la, x = fitted()
    la(x)
    first = la(x[:1])
    la.prior_precision = 0.01
    wide = la(x[:1])
    la.softmax_temperature = 3.0
    soft = la(x[:1])
    assert short[1:] == 3 * [True]
    torch.testing.assert_close(soft, la(x)[:1])
    la.softmax_temperature = 1.0
    torch.testing.assert_close(wide, la(x)[:1])
    assert not torch.allclose(first, wide)
    assert not torch.allclose(soft, wide)


def test_a_prediction_keeps_the_posterior_that_it_was_made_with(short):
    la, x = fitted()
    la(x)
    expected = la.predict(x)[:1]
    before = la.predict(x[:1])
    la.prior_precision = 1e-3
    with torch.no_grad():
        la.model[2].weight.mul_(2)
    assert short[-1]
    torch.testing.assert_close(before.epistemic, expected.epistemic)
    torch.testing.assert_close(before.outputs.covariance, expected.outputs.covariance)


@pytest.mark.parametrize("network", [Copied, Greedy])
def test_other_networks_are_predicted_as_in_a_batch_and_inputs_stay_as_they_were(network):
    la, x = fitted(network)
    given, expected = x.clone(), la(x)
    for _ in range(3):
        torch.testing.assert_close(la(x[:1]), expected[:1])
    assert torch.equal(x, given)
    assert la.runner.ready._idle  # the copy of the network is kept, whichever way is taken


def test_mistakes_are_told_as_ever():
    la, x = fitted()
    la(x)
    la(x[:1])
    with pytest.raises(ModelError, match="the network failed"):
        la(x[:1, :2])
    with pytest.raises(InputError, match="NaN"):
        la(torch.full((1, INPUTS), torch.nan, dtype=x.dtype))
    torch.testing.assert_close(la(x[:1]), la(x)[:1])


@pytest.mark.parametrize("read", [False, True])
def test_predictions_can_be_copied_and_pickled(read):
    la, x = fitted()
    la(x)
    prediction = la.predict(x[:1])
    expected = la.predict(x)[:1]
    if read:
        _ = prediction.epistemic
    for same in (copy.deepcopy(prediction), pickle.loads(pickle.dumps(prediction)), prediction[:1]):  # noqa: S301
        torch.testing.assert_close(same.mean, expected.mean)
        torch.testing.assert_close(same.outputs.variance, expected.outputs.variance)
        torch.testing.assert_close(same.epistemic, expected.epistemic)
    assert len(pickle.dumps(prediction)) < 50_000  # it does not lead to the posterior


def test_gradients_and_modes_take_the_general_way(short):
    la, x = fitted(enable_backprop=True)
    la(x)
    one = x[:1].clone().requires_grad_()
    la(one)[0, 0].backward()
    assert one.grad is not None
    assert not any(short)


def test_many_threads_predict_at_once():
    la, x = fitted()
    expected, wrong = la.predict(x).mean, list[int]()

    def work(offset: int) -> None:
        for i in range(40):
            at = (i + offset) % N
            if not torch.allclose(la.predict(x[at : at + 1]).mean, expected[at : at + 1]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
