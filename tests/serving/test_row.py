"""A served module predicts one input in NumPy: the numbers of a batch, and of its tensors as they are now."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from laplace import Laplace
from laplace.serving import PredictiveModule
from laplace.serving.row import ServedRow

N, INPUTS, CLASSES = 40, 5, 4


def served(
    dtype=torch.float64, outputs=("mean", "variance"), structure="kron", **options
) -> tuple[PredictiveModule, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 7), nn.Tanh(), nn.Linear(7, CLASSES)).to(dtype)
    x = 2 * torch.randn(N, INPUTS, dtype=dtype)
    la = Laplace(model, "classification", "last_layer", structure, **options)
    return la.fit([(x, torch.randint(CLASSES, (N,)))]).module(outputs=outputs), x


@pytest.fixture
def rows(monkeypatch) -> list[bool]:
    """Whether each prediction of one input was made in NumPy."""
    taken: list[bool] = []
    call = ServedRow.__call__

    def watched(self, phi):
        found = call(self, phi)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(ServedRow, "__call__", watched)
    return taken


def assert_as_in_a_batch(module: PredictiveModule, x: Tensor) -> None:
    together = module(x)
    for i in range(3):
        for name, value in module(x[i : i + 1]).items():
            torch.testing.assert_close(value, together[name][i : i + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outputs", [("mean",), ("mean", "variance"), ("variance", "mean")])
@pytest.mark.parametrize("structure", ["kron", "diag", "ekfac", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_input_is_predicted_as_in_a_batch(dtype, structure, outputs, rows):
    module, x = served(dtype, outputs, structure, softmax_temperature=1.3)
    assert list(module(x[:1])) == list(outputs)
    assert_as_in_a_batch(module, x)
    assert rows == ([] if structure == "full" else 4 * [True])


def load(module: PredictiveModule) -> None:
    module.load_state_dict({name: 1.1 * t for name, t in module.state_dict().items()})


def assign(module: PredictiveModule) -> None:
    module.load_state_dict({name: 1.1 * t for name, t in module.state_dict().items()}, assign=True)


def write_layer(module: PredictiveModule) -> None:
    with torch.no_grad():
        module.network[2].weight.mul_(1.5)


def write_buffer(module: PredictiveModule) -> None:
    module.predictive.contrasts.by_output.mul_(2)


def set_data(module: PredictiveModule) -> None:
    module.network[2].bias.data = 3 * module.network[2].bias.data + torch.arange(CLASSES)


def to_single(module: PredictiveModule) -> None:
    module.float()


def layer_to_single(module: PredictiveModule) -> None:
    module.network.float()


@pytest.mark.parametrize("change", [load, assign, write_layer, write_buffer, set_data, to_single, layer_to_single])
def test_whatever_is_done_to_its_tensors_is_seen(change):
    module, x = served()
    before = module(x[:1])["mean"]
    change(module)
    x = x.to(module.network[0].weight.dtype)
    assert_as_in_a_batch(module, x)
    if change not in (to_single, layer_to_single):
        assert not torch.allclose(module(x[:1])["mean"], before, atol=1e-4)


def test_copies_have_rows_of_their_own():
    module, x = served()
    expected = module(x[:1])
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        torch.testing.assert_close(same(x[:1]), expected)
        write_layer(same)
        assert_as_in_a_batch(same, x)
    torch.testing.assert_close(module(x[:1]), expected)


def test_a_number_that_is_not_finite_gives_nan():
    module, x = served()
    bad = x[:1].clone()
    bad[0, 0] = torch.nan
    assert module(bad)["mean"].isnan().all()


def test_whoever_follows_the_operations_sees_all_of_them(rows):
    module, x = served(outputs="mean")
    one = x[:1].clone().requires_grad_()
    module(one)[0, 0].backward()
    assert one.grad is not None
    _, tangent = torch.func.jvp(module, (x[:1],), (torch.ones_like(x[:1]),))
    assert tangent.abs().max() > 0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[:1], torch.ones_like(x[:1]))
        out = torch.autograd.forward_ad.unpack_dual(module(dual)).tangent
    torch.testing.assert_close(out, tangent)
    with FlopCounterMode(display=False) as counter:
        module(x[:1])
    with FlopCounterMode(display=False) as twice:
        module(x[:2])
    assert 2 * counter.get_total_flops() == twice.get_total_flops()
    assert not rows


def test_many_threads_predict_at_once():
    module, x = served()
    expected, wrong = module(x)["mean"], list[int]()

    def work(offset: int) -> None:
        for i in range(100):
            at = (i + offset) % N
            if not torch.allclose(module(x[at : at + 1])["mean"], expected[at : at + 1]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
