"""A prediction can be cut, joined, moved, and read as arrays and tables."""

from __future__ import annotations

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

from laplace import Laplace, Prediction
from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.predictive.reshape import PredictionAtPositions
from networks import cut, make

CASES = {
    "classes": ("classification", {}),
    "bridge": ("classification", {"link_approx": "bridge"}),
    "draws": ("classification", {"pred_type": "nn", "n_samples": 7}),
    "regression": ("regression", {}),
    "independent": ("regression", {"diagonal_output": True}),
    "labels": ("multilabel", {}),
    "counts": ("poisson", {}),
    "mixture": ("poisson", {"pred_type": "nn", "n_samples": 7}),
}


def predicted(case: str) -> tuple[Prediction, Laplace, torch.Tensor]:
    task, options = CASES[case]
    model, x, y = make("mlp", task if task in ("classification", "regression") else "regression")
    y = {"multilabel": y > 0, "poisson": y.abs().round()}.get(task, y)
    la = Laplace(model, task).fit(cut(x, y.to(y.dtype if task == "classification" else x.dtype), 6))
    return la.predict(x, generator=torch.Generator().manual_seed(0), **options), la, x


def same(a, b):
    torch.testing.assert_close(a.mean, b.mean)
    torch.testing.assert_close(a.total, b.total)
    torch.testing.assert_close(a.quantile(0.3), b.quantile(0.3))
    assert type(a.distribution) is type(b.distribution)
    torch.testing.assert_close(a.distribution.mean, b.distribution.mean, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_parts_joined_are_the_whole(case):
    p, _, _ = predicted(case)
    same(Prediction.cat([p[:5], p[5], p[6:]]), p)
    assert len(Prediction.cat([*p])) == len(p)


@pytest.mark.parametrize("case", CASES)
def test_an_index_takes_the_rows_that_numpy_takes(case):
    p, _, _ = predicted(case)
    mask = np.arange(len(p)) % 3 == 0
    for index in (slice(2, 9, 2), slice(None, None, -1), mask, torch.tensor(mask), [4, 1], np.array([-1, 0]), slice(0)):
        array = index if isinstance(index, slice) else np.asarray(index)
        part = p[index]
        np.testing.assert_array_equal(part.mean.numpy(), p.mean.numpy()[array])
        np.testing.assert_array_equal(part.total.numpy(), p.total.numpy()[array])
        np.testing.assert_allclose(part.outputs.mean.numpy(), p.outputs.mean.numpy()[array], rtol=1e-12)
        assert part.distribution.batch_shape == (len(part), *p.distribution.batch_shape[1:])
    for i in (3, -1, np.int64(2), torch.tensor(1)):
        same(p[i], p[[int(i)]])
        assert len(p[i]) == 1


@pytest.mark.parametrize("case", ["classes", "draws", "regression", "counts"])
def test_copies_and_pickles_and_moves_are_the_same(case):
    p, _, _ = predicted(case)
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p)), p.to("cpu")):  # noqa: S301
        same(other, p)
    moved = p.to("meta")
    tensors = [moved.mean, moved.total, moved.outputs.mean, *vars(moved.distribution).values()]
    assert all(t.device.type == "meta" for t in tensors if isinstance(t, torch.Tensor))


def test_moments_are_those_of_the_distribution():
    for case in ("regression", "independent", "counts"):
        p, _, _ = predicted(case)
        torch.testing.assert_close(p.variance, p.distribution.variance)
        torch.testing.assert_close(p.std.square(), p.variance)
    p, _, _ = predicted("regression")
    torch.testing.assert_close(p.entropy, p.distribution.entropy())
    p, _, _ = predicted("classes")
    torch.testing.assert_close(p.entropy, p.distribution.entropy())
    torch.testing.assert_close(p.variance, p.mean * (1 - p.mean))
    assert torch.equal(p.label, p.mean.argmax(1))
    p, _, _ = predicted("labels")
    torch.testing.assert_close(p.entropy, p.distribution.entropy())
    torch.testing.assert_close(p.variance, p.distribution.variance)
    assert torch.equal(p.label, (p.mean > 0.5).long())


@pytest.mark.parametrize("case", CASES)
def test_arrays_hold_every_summary(case):
    p, _, _ = predicted(case)
    arrays = p.numpy()
    assert set(arrays) >= {"mean", "std", "variance", "epistemic", "aleatoric", "total"}
    assert ("entropy" in arrays) == (p.kind != "counts")
    assert ("label" in arrays) == (p.kind in ("classes", "labels"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, getattr(p, name).numpy())


def test_tables_have_a_row_for_each_input():
    p, _, _ = predicted("classes")
    table = p.to_pandas(names=["cat", "dog", "emu"][: p.mean.shape[1]], level=0.9)
    words = ["cat", "dog", "emu"][: p.mean.shape[1]]
    assert table["label"].tolist() == [words[i] for i in p.label]
    assert list(table.columns)[: 1 + len(words)] == ["label", *(f"p_{w}" for w in words)]
    np.testing.assert_array_equal(table["lower_cat"], p.interval(0.9)[0][:, 0])
    p, _, _ = predicted("regression")
    np.testing.assert_array_equal(p.to_pandas()["std_1"], p.std[:, 1])
    model = nn.Linear(3, 1)
    one = Laplace(model, "regression").fit(np.ones((4, 3)), np.ones((4, 1))).predict(np.eye(3))
    assert list(one.to_pandas(level=0.5).columns) == ["mean", "std", "lower", "upper", "epistemic", "aleatoric"]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_predictions_at_positions_are_cut_joined_and_tabled_by_example(task):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 2, 4)
    y = torch.randint(3, (5, 2)) if task == "classification" else torch.randn(5, 2, 3)
    p = Laplace(model, task).fit([(x, y)]).predict(x)
    assert isinstance(p, PredictionAtPositions)
    same(p[1:3], Laplace(model, task).fit([(x, y)]).predict(x[1:3]))
    same(PredictionAtPositions.cat([p[:2], p[2], p[[3, 4]]]), p)
    assert p.std.shape == p.mean.shape == p.numpy()["std"].shape
    assert p.to("cpu").mean.shape == (5, 2, 3)
    table = p.to_pandas()
    assert table.index.names == ["example", "position"]
    assert len(table.loc[2]) == 2
    if task == "classification":
        assert torch.equal(p.label, p.mean.argmax(-1))
        assert p.entropy.shape == (5, 2)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32])
def test_small_integers_are_positions_and_no_mask(kind):
    p, _, _ = predicted("classes")
    same(p[np.array([2, 0, 1], kind)], p[[2, 0, 1]])
    same(p[torch.ones(len(p), dtype=torch.uint8)], p[[1] * len(p)])


@pytest.mark.parametrize("index", [1.5, "a", [0.5], np.ones(3, bool), torch.ones(2, 2, dtype=torch.long), None, [99]])
def test_a_bad_index_is_said(index):
    p, _, _ = predicted("classes")
    with pytest.raises(InputError, match="does not index 23 inputs"):
        p[index]


def test_what_is_not_there_is_said(monkeypatch):
    classes, la, x = predicted("classes")
    regression, _, _ = predicted("regression")
    counts, _, _ = predicted("counts")
    with pytest.raises(IndexError, match="index 23 is not among 23"):
        classes[23]
    with pytest.raises(UnsupportedError, match="regression has no label"):
        _ = regression.label
    with pytest.raises(UnsupportedError, match="entropy of counts"):
        _ = counts.entropy
    for wrong in ([], [classes, 3]):
        with pytest.raises(InputError, match="at least one"):
            Prediction.cat(wrong)
    with pytest.raises(InputError, match="cannot be joined"):
        Prediction.cat([classes, la.predict(x, pred_type="nn")])
    with pytest.raises(InputError, match="families Categorical, Dirichlet"):
        Prediction.cat([classes, la.predict(x, link_approx="bridge")])
    with pytest.raises(OptionError, match="must be 3 names"):
        classes.to_pandas(names=["a"])
    with pytest.raises(OptionError, match="has a name twice"):
        classes.to_pandas(names=["a", "b", "a"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"laplace-redux\[pandas\]"):
        classes.to_pandas()
