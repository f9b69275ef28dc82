"""Predictions keep the copy of the network that they run, and make it anew as soon as anything has changed."""

from __future__ import annotations

import copy
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from laplace import Laplace
from laplace.errors import ModelError, StaleWarning
from laplace.inference import runner as running

N, INPUTS, CLASSES = 12, 4, 3
WEIGHTS = ["last_layer", "all"]
pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")


class Net(nn.Module):
    """Reads plain attributes, a list, a mapping and an object on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
        self.register_buffer("shift", torch.zeros(6))
        self.scale, self.scales, self.options = 1.0, [1.0], {"scale": 1.0}
        self.config = SimpleNamespace(scale=1.0, inner=None)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.scale * sum(self.scales) * self.options["scale"] * self.config.scale
        h = self.norm(self.first(x)).tanh() * factor + self.shift
        return self.head(h if self.config.inner is None else self.config.inner(h))


class Counting(Net):
    """Counts its calls, and its outputs depend on the count."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * self.calls)


class Remembering(Net):
    """Keeps what it computed last in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return super().forward(x * len(self.seen))


class Writing(Net):
    """Writes to a buffer in eval mode, which its outputs depend on."""

    def forward(self, x: Tensor) -> Tensor:
        self.shift += 1
        return super().forward(x)


def fitted(network: type[Net] = Net, weights: str = "last_layer") -> tuple[Laplace, Tensor]:
    torch.manual_seed(0)
    model, x = network().double(), torch.randn(N, INPUTS, dtype=torch.float64)
    la = Laplace(model, "classification", weights).fit([(x, torch.randint(CLASSES, (N,)))])
    return la, x


@pytest.fixture
def made(monkeypatch) -> list[nn.Module]:
    """All replicas that predictions make."""
    found: list[nn.Module] = []
    keep, replicate = running.replicate_to_keep, running.replicate

    def keeping(model, tracked):
        found.append(model)
        return keep(model, tracked)

    def replicating(model, tracked):
        found.append(model)
        return replicate(model, tracked)

    monkeypatch.setattr(running, "replicate_to_keep", keeping)
    monkeypatch.setattr(running, "replicate", replicating)
    return found


@pytest.mark.parametrize("weights", WEIGHTS)
def test_one_replica_serves_many_predictions(made, weights):
    la, x = fitted(weights=weights)
    made.clear()
    first = la(x)
    for n in (1, 5, N):
        torch.testing.assert_close(la(x[:n]), first[:n])  # other sums of other sizes: not to the last bit
        la.predict(x[:n])
        la.functional_samples(x[:n], n_samples=2)
    assert len(made) == 1


def set_scale(model: Net) -> None:
    model.scale = 2.0


def append(model: Net) -> None:
    model.scales.append(3.0)


def set_option(model: Net) -> None:
    model.options["scale"] = 2.0


def set_config(model: Net) -> None:
    model.config.scale = 2.0


def set_inner(model: Net) -> None:
    model.config.inner = nn.Linear(6, 6).double()


def swap_layer(model: Net) -> None:
    model.first = nn.Linear(INPUTS, 6).double()


def swap_parameter(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.randn(6, INPUTS, dtype=torch.float64))


def write_parameter(model: Net) -> None:
    with torch.no_grad():
        model.first.weight.mul_(2)


def write_data(model: Net) -> None:
    model.first.weight.data = 2 * model.first.weight.data


def turn_data(model: Net) -> None:
    model.config.inner = None
    model.first.weight.data = model.first.weight.data.clone().T.contiguous().T * 1.5


def write_buffer(model: Net) -> None:
    model.shift += 1


def set_buffer(model: Net) -> None:
    model.shift = torch.ones(6, dtype=torch.float64)


def add_hook(model: Net) -> None:
    model.first.register_forward_hook(lambda module, args, out: 2 * out)


def set_forward(model: Net) -> None:
    own = model.first.forward
    model.first.forward = lambda x: 2 * own(x)


def set_class(model: Net) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.first.__class__ = Doubled


CHANGES = [
    set_scale, append, set_option, set_config, set_inner, swap_layer, swap_parameter, write_parameter, write_data,
    turn_data, write_buffer, set_buffer, add_hook, set_forward, set_class,
]  # fmt: skip


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changes_in_the_network_is_seen_by_the_next_prediction(change, weights):
    la, x = fitted(weights=weights)
    la(x)
    before = la.predict(x, diagonal_output=True).outputs.mean
    change(la.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleWarning)
        found = la.predict(x, diagonal_output=True).outputs.mean
    with torch.no_grad():
        expected = copy.deepcopy(la.model).eval()(x)
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("network", [Counting, Remembering, Writing])
def test_what_a_run_leaves_in_the_network_does_not_reach_the_next_prediction(network, weights):
    la, x = fitted(network, weights=weights)
    expected = la(x)
    for _ in range(3):
        assert torch.equal(la(x), expected)
    assert la.model.__dict__.get("calls", 0) == 0
    assert not la.model.__dict__.get("seen")
    assert not la.model.shift.any()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_run_that_leaves_something_is_not_kept_in_memory(weights):
    la, x = fitted(Remembering, weights=weights)
    la(x)
    assert not la.runner.ready._idle


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_change_of_the_last_layer_through_data_is_noticed(weights):
    la, x = fitted(weights=weights)
    la(x)
    la.model.head.weight.data[0, 0] += 1
    with pytest.warns(StaleWarning, match="uncertain weights"):
        la(x)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("change", [lambda layer: weight_norm(layer), lambda layer: setattr(layer, "bias", None)])
def test_weights_that_are_gone_are_an_error_that_names_them(weights, change):
    la, x = fitted(weights=weights)
    la(x)
    change(la.model.head)
    for call in (lambda: la(x), lambda: la.predict(x[:1]), lambda: la.functional_samples(x)):
        with pytest.raises(ModelError, match=r"no longer has head\.(weight|bias).*fit again"):
            call()


def test_a_changed_network_raises_each_time_where_warnings_are_errors():
    la, x = fitted()
    la(x)
    with torch.no_grad():
        la.model.first.weight.mul_(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleWarning)
        for _ in range(2):
            with pytest.raises(StaleWarning):
                la(x)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_exception_in_the_network_leaves_predictions_as_they_were(weights):
    la, x = fitted(weights=weights)
    expected = la(x)
    with pytest.raises(ModelError):
        la(x[:, :2])
    assert torch.equal(la(x), expected)
    armed = la.model.first.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ModelError):
        la(x)
    armed.remove()
    assert torch.equal(la(x), expected)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_threads_do_not_meet_in_a_replica(made, weights):
    la, x = fitted(weights=weights)
    expected = {n: la(x[:n]) for n in range(1, 9)}
    wrong: list[int] = []

    def predict(n: int) -> None:
        for _ in range(40):
            if not torch.equal(la(x[:n]), expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=predict, args=(n,)) for n in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copies_have_replicas_of_their_own():
    la, x = fitted()
    expected = la(x)
    other = copy.deepcopy(la)
    assert torch.equal(other(x), expected)
    with torch.no_grad():
        other.model.shift += 1
    assert torch.equal(la(x), expected)


def test_a_refit_is_seen_by_the_next_prediction():
    la, x = fitted()
    la(x)
    with torch.no_grad():
        la.model.first.weight.mul_(0.5)
        la.model.head.weight.mul_(2)
    y = torch.randint(CLASSES, (N,))
    la.fit([(x, y)])
    torch.testing.assert_close(la(x), Laplace(la.model, "classification").fit([(x, y)])(x))


def test_uncertainty_that_is_read_later_is_the_same():
    la, x = fitted()
    late = la.predict(x)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        epistemic = late.epistemic
    now = la.predict(x)
    assert torch.equal(epistemic, now.epistemic)
    assert epistemic.dtype == torch.float64
    torch.testing.assert_close(now.total, -(now.mean * now.mean.log()).sum(-1))
