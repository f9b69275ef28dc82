"""What numpy makes of a prediction, and what is said of an example that comes without a batch around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InputError
from laplace.evaluation import rmse


def mlp(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


# network, shape of an example, shape of its labels (None: a class), class_dim
CASES = {
    "regression": (mlp, (3,), (2,), -1),
    "one output": (lambda: mlp(3, 1), (3,), (1,), -1),
    "one input, one output": (lambda: mlp(1, 1), (1,), (1,), -1),
    "classes": (mlp, (3,), None, -1),
    "images": (conv, (3, 8, 8), None, -1),
    "pixels": (pixels, (3, 8, 8), (8, 8), 1),
    "one number": (OneNumber, (3,), (), None),
}


def fitted(case: str, subset: str = "last_layer", structure: str = "kron") -> tuple[Laplace, Tensor]:
    torch.manual_seed(0)
    make, shape, target, class_dim = CASES[case]
    classes = target is None or case == "pixels"
    x = torch.randn(10, *shape)
    y = torch.randint(0, 2, (10, *(target or ()))) if classes else torch.randn(10, *(target or ()))
    la = Laplace(make(), "classification" if classes else "regression", subset, structure, class_dim=class_dim)
    return la.fit([(x, y)]), x


@pytest.mark.parametrize("case", CASES)
def test_numpy_reads_the_mean(case):
    la, x = fitted(case)
    prediction = la.predict(x)
    array = np.asarray(prediction)
    assert array.shape == tuple(la.model(x).shape)
    np.testing.assert_array_equal(array, prediction.numpy()["mean"])
    assert np.asarray(prediction, dtype=np.float64).dtype == np.float64
    assert np.array(prediction, dtype="int32").dtype == np.int32
    np.testing.assert_allclose(np.abs(prediction), prediction.mean.abs().numpy())


def test_copies_are_made_as_numpy_asks():
    la, x = fitted("regression")
    prediction = la.predict(x)
    shared, apart = np.asarray(prediction), np.array(prediction, copy=True)
    assert np.shares_memory(shared, prediction.mean.numpy())
    assert not np.shares_memory(apart, prediction.mean.numpy())
    if int(np.__version__.partition(".")[0]) >= 2:
        assert np.shares_memory(np.asarray(prediction, copy=False), shared)
        with pytest.raises(ValueError, match="copy"):
            np.asarray(prediction, dtype=np.float64, copy=False)


def test_predictions_can_be_scored_and_have_no_graph():
    la, x = fitted("regression")
    la.enable_backprop = True
    prediction = la.predict(x.clone().requires_grad_())
    y = torch.zeros(10, 2)
    assert rmse(prediction, y) == pytest.approx(rmse(prediction.mean, y), rel=1e-6)


@pytest.mark.parametrize(("subset", "structure"), [("last_layer", "kron"), ("all", "diag"), ("all", "gp")])
@pytest.mark.parametrize("case", CASES)
def test_an_example_without_a_batch_is_refused_with_what_to_write(case, subset, structure):
    if (case, structure) == ("pixels", "gp"):
        return  # which keeps whole examples, and is for outputs without positions
    la, x = fitted(case, subset, structure)
    calls = [la, la.predict, la.functional_samples, lambda x: la.predict([x])]
    calls += [] if structure == "gp" else [lambda x: la(x, pred_type="nn")]
    for call in calls:
        with pytest.raises(InputError, match=r"single example, but a batch is needed. Write x\[0:1\]"):
            call(x[0])
        call(x[0:1])
    wide = la.predict(x).mean
    torch.testing.assert_close(la.predict(x[0:1]).mean, wide[0:1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", ["regression", "one output", "classes", "images"])
def test_a_posterior_from_a_file_refuses_it_too(case, tmp_path):
    la, x = fitted(case, "all", "diag")
    la.save(tmp_path / "la.safetensors")
    again = Laplace.load(tmp_path / "la.safetensors", la.model)
    with pytest.raises(InputError, match=r"Write x\[0:1\]"):
        again(x[0])
    again(x[0:1])


def test_a_sequence_is_a_batch_of_its_positions_to_a_network_that_reads_each():
    torch.manual_seed(0)
    x, y = torch.randn(10, 5, 3), torch.randint(0, 2, (10, 5))
    la = Laplace(mlp(), "classification").fit([(x, y)])
    torch.testing.assert_close(la(x[0]), la(x[0:1])[0])


def test_other_errors_of_the_network_stay():
    la, x = fitted("regression")
    with pytest.raises(Exception, match="the network failed on a tensor"):
        la(x[:, :2])
    with pytest.raises(Exception, match="the network failed on a tensor"):
        la(x[0, :2])
