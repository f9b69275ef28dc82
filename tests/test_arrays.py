"""numpy arrays, DataFrames and lists of numbers give what tensors give, wherever data is taken."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from laplace import Laplace
from laplace.errors import InputError, LaplaceWarning, ModelError, OptionError
from laplace.network.loaders import ArrayBatches
from laplace.network.overlap import overlap

N = 23  # of which no batch size below is a divisor


def data(task="classification", inputs=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, inputs))
    return x, rng.integers(0, 2, N) if task == "classification" else rng.normal(size=(N, 2))


def network(inputs=3, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


FORMS = {
    "numpy": lambda a: a,
    "backwards": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "read-only": lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
    "columns first": lambda a: np.asfortranarray(a),
    "pandas": lambda a: pd.DataFrame(a) if a.ndim == 2 else pd.Series(a),
    "list": lambda a: a.tolist(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_give_the_posterior_and_the_predictions_of_tensors(form, task, dtype):
    x, y = data(task)
    model, made = network(dtype=dtype), FORMS[form]
    tensors = torch.tensor(x, dtype=dtype), torch.tensor(y)
    expected = Laplace(model, task).fit([tensors])
    wanted = expected.predict(tensors[0])
    for la in (
        Laplace(model, task).fit(made(x), made(y)),
        Laplace(model, task).fit(made(x), y=made(y), batch_size=7),
        Laplace(model, task).fit([(made(x[:9]), made(y[:9])), (made(x[9:]), made(y[9:]))]),
        Laplace(model, task).fit((made(x), made(y))),
        Laplace(model, task).fit(*tensors, batch_size=5),
    ):
        torch.testing.assert_close(la.posterior_variance, expected.posterior_variance, rtol=1e-4, atol=0)
        batches = [] if form == "list" else [[made(x[:9]), made(x[9:])]]  # of lists: one array, and ragged
        for given in (made(x), *batches, [(made(x), made(y))]):
            found = la.predict(given)
            assert found.mean.dtype is dtype
            torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-5, atol=1e-6)
    la.tune("prior_precision", method="validation", val_loader=(made(x), made(y)), grid_size=3, bounds=WIDE)
    assert float(la.prior_precision) != 1


WIDE = {"prior_precision": (1e-8, 1e8)}


def test_several_inputs_and_mappings_may_hold_arrays():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(4)

        def forward(self, a, b):
            return self.net(torch.cat([a, b], 1))

    x, y = data(inputs=4)
    model, tensor = Two(), torch.tensor(x, dtype=torch.float32)
    parts = tensor[:, :1], tensor[:, 1:]
    expected = Laplace(model, "classification").fit([(parts, torch.tensor(y))])
    for given in ((x[:, :1], x[:, 1:]), {"a": x[:, :1], "b": pd.DataFrame(x[:, 1:])}):
        la = Laplace(model, "classification", dict_key_x="a").fit(given, y, batch_size=6)
        torch.testing.assert_close(la.posterior_variance, expected.posterior_variance, rtol=1e-4, atol=0)
        torch.testing.assert_close(la(given), expected(parts), rtol=1e-5, atol=1e-6)


def test_whole_numbers_stay_so_but_those_of_a_dataframe_are_features():
    torch.manual_seed(0)
    tokens = np.array([[0, 1], [2, 3], [4, 0]], dtype=np.uint16)
    y = np.array([0, 1, 0], dtype=np.int32)
    words = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2))
    la = Laplace(words, "classification").fit(tokens, y)
    torch.testing.assert_close(la(tokens), la(torch.tensor(tokens.astype(np.int64))))
    table = pd.DataFrame({"age": [31, 4, 65], "tall": [True, False, True], "dose": [0.5, 0.1, 0.2]})
    model = network()
    of_table = Laplace(model, "classification").fit(table, pd.Series(y))
    numbers = torch.tensor(table.to_numpy(dtype=float)).float()
    torch.testing.assert_close(of_table(table), of_table(numbers))
    whole = table[["age"]].assign(b=[1, 2, 3], c=[0, 0, 1])
    torch.testing.assert_close(of_table(whole), of_table(torch.tensor(whole.to_numpy()).float()))


def test_more_data_can_be_added_and_override_keeps_its_place():
    x, y = data()
    la = Laplace(network(), "classification", hessian_structure="diag").fit(x[:9], y[:9])
    la.fit(x[9:], y=y[9:], override=False)
    whole = Laplace(la.model, "classification", hessian_structure="diag").fit(x, y)
    torch.testing.assert_close(la.posterior_variance, whole.posterior_variance, rtol=1e-4, atol=0)
    loader = DataLoader([(torch.tensor(a).float(), b) for a, b in zip(x, y, strict=True)], 8)
    assert la.fit(loader, True).n_data == N
    assert la.fit(loader, False).n_data == 2 * N


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda la, x, y: la.fit(x, y[:3]), "23 examples and y has 3 labels"),
        (lambda la, x, y: la.fit((x[:2], x), y), "2 and 23 examples and y has 23 labels"),
        (lambda la, x, y: la.fit(x[0], y[0]), "single example.*batch is needed"),
        (lambda la, x, y: la.fit(x), r"no labels. Write la.fit\(x, y\)"),
        (lambda la, x, y: la.fit(x, ["a"] * N), "begins with 'a'.*np.unique.*LaplaceClassifier"),
        (lambda la, x, y: la.fit([(x, y)], y), "list has its own labels"),
        (lambda la, x, y: la.fit(x, y > 0), r"dtype torch.bool; integers are needed.*y.astype\(int\) for an array"),
        (lambda la, x, y: la.fit(x.astype(str), y), "Numbers are needed"),
        (lambda la, x, y: la.predict(x[0]), r"single example, but a batch is needed"),
        (lambda la, x, y: la(x[0].tolist()), r"single example, but a batch is needed"),
        (lambda la, x, y: la.predict(pd.DataFrame(x).assign(city="Ulm")), "columns city of a DataFrame"),
        (lambda la, x, y: la.predict(np.array([["02139", 1.0, 2.0]], object)), "begins with '02139'"),
        (lambda la, x, y: la.predict(pd.DataFrame(x[:, :2]).assign(zip="02139")), "columns zip of a DataFrame"),
        (lambda la, x, y: la.predict(np.ma.masked_array(x)), "masked numpy array"),
        (lambda la, x, y: la.predict([[1.0, 2.0], [3.0]]), "does not become one array"),
        (lambda la, x, y: la.predict(np.full((2, 3), np.nan)), "NaN or infinite values"),
    ],
)
def test_bad_arrays_are_one_clear_error(call, says):
    x, y = data()
    la = Laplace(network(), "classification").fit(x, y)
    before = float(la.log_marginal_likelihood())
    with pytest.raises((InputError, OptionError), match=says):
        call(la, x, y)
    assert float(la.log_marginal_likelihood()) == before


def test_data_of_a_read_only_array_is_recognised_without_a_warning_of_torch():
    x, y = data()
    x.flags.writeable = y.flags.writeable = False
    la = Laplace(network(), "classification").fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", LaplaceWarning)
        assert overlap(la.training_data, ArrayBatches(x, y)) == "holds the tensors that la was fitted on"
        assert not overlap(la.training_data, ArrayBatches(x.copy(), y.copy()))


def test_inputs_without_columns_say_how_to_make_one():
    x = np.linspace(0, 1, 30)
    with pytest.raises(ModelError, match=r"Each example is one number here.*x.reshape\(-1, 1\)"):
        Laplace(nn.Linear(1, 1), "regression").fit(x, x)


def test_options_that_do_not_go_together_are_said():
    x, y = data()
    la = Laplace(network(), "classification")
    with pytest.raises(OptionError, match=r"batch_size= for la.fit\(x, y\), too; a list makes its batches itself"):
        la.fit([(x, y)], batch_size=3)
    with pytest.raises(OptionError, match="labels twice"):
        la.fit(x, y, y=y)
    with pytest.raises(OptionError, match="batch_size=0 must be a whole number"):
        la.fit(x, y, batch_size=0)
