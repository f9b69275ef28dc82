"""What the object does beyond its guarantee: levels, sources, files, randomness, errors."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.conformal import Conformal, from_predictions
from laplace.conformal.calls import conformal
from laplace.errors import (
    CheckpointError,
    InputError,
    LaplaceWarning,
    MissingKeyError,
    NotFittedError,
    OptionError,
    StaleWarning,
    UnsupportedError,
)
from made_up_predictions import classes, random_classes, random_regression, regression

X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
Y = {
    "regression": X[:, :2] + 0.3 * torch.randn(200, 2, generator=torch.Generator().manual_seed(1)),
    "classification": (X[:, 0] > 0).long() + (X[:, 1] > 1).long(),
    "multilabel": (X[:, :2] > 0.2).float(),
    "poisson": torch.poisson(X[:, :1].exp(), generator=torch.Generator().manual_seed(2)),
}
OUTPUTS = {"regression": 2, "classification": 3, "multilabel": 2, "poisson": 1}
CASES = [
    ("regression", "scaled", {}),
    ("regression", "absolute", {}),
    ("regression", "cqr", {}),
    ("classification", "lac", {}),
    ("classification", "aps", {"class_conditional": True}),
    ("classification", "raps", {"penalty": 0.2, "k_reg": 1, "randomized": False}),
    ("multilabel", "lac", {}),
    ("poisson", "scaled", {}),
]


def posterior(task, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, OUTPUTS[task]))
    return Laplace(net, task).fit(X[:80], Y[task][:80])


def results(made, x):
    return made.interval(x) if made.kind in ("regression", "counts") else (made.set(x, generator=seeded()),)


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("task", "method", "options"), CASES)
def test_a_file_gives_the_same_sets_and_holds_no_inputs(tmp_path, task, method, options):
    la = posterior(task)
    made = la.conformal((X[80:], Y[task][80:]), 0.8, method, generator=seeded(), **options)
    made.save(tmp_path / "made.safetensors")
    la.save(tmp_path / "la.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Conformal.load(tmp_path / "made.safetensors", Laplace.load(tmp_path / "la.safetensors", la.model))
        for one, other in zip(results(made, X[:9]), results(again, X[:9]), strict=True):
            assert torch.equal(one, other)
    assert repr(again) == repr(made)
    assert again.method == method
    assert made.n_calibration == again.n_calibration == 120
    assert (tmp_path / "made.safetensors").stat().st_size < 120 * 2 * 8 * 2 + 120 * 8 + 4000
    alone = Conformal.load(tmp_path / "made.safetensors")
    prediction = la.predict(X[:9])
    for one, other in zip(results(alone, prediction), results(made, prediction), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(InputError, match=r"Conformal\.load\(path, la\)"):
        results(alone, X[:9])


@pytest.mark.parametrize(("task", "method", "options"), CASES)
def test_a_call_may_name_its_level_and_sets_grow_with_it(task, method, options):
    la = posterior(task)
    data = X[80:], Y[task][80:]
    whole = la.conformal(data, 0.5, method, generator=seeded(), **options)
    for level in (0.6, 0.9):
        other = la.conformal(data, level, method, generator=seeded(), **options)
        torch.testing.assert_close(whole.threshold(level), other.threshold())
        found = whole.coverage_test(data, level=level, generator=seeded())
        assert found.coverage >= level - 0.02  # the calibration examples themselves
        assert found.level == level
    if task in ("regression", "poisson"):
        widths = [(high - low).mean() for low, high in (whole.interval(X, level) for level in (0.5, 0.9))]
        assert widths[0] < widths[1]
    else:
        small, large = (whole.set(X, level, generator=seeded()) for level in (0.5, 0.9))
        assert (small <= large).all()


def test_predictions_loaders_arrays_and_mappings_calibrate_alike():
    la, y = posterior("regression"), Y["regression"]
    x, t = X[80:], y[80:]
    expected = la.conformal((x, t)).interval(X)
    loader = DataLoader(TensorDataset(x, t), batch_size=7)
    forms = [
        la.conformal(loader),
        la.conformal(x, y=t),
        la.conformal(x.numpy(), y=t.numpy()),
        la.conformal([(x[:1], t[:1]), (x[1:], t[1:])]),
        la.conformal(TensorDataset(x, t)),
        from_predictions(la.predict(x), t),
    ]
    for made in forms:
        found = made.interval(la.predict(X))
        torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(forms[0].interval(DataLoader(X, batch_size=9))[1], expected[1])


def test_mappings_are_read_by_their_keys():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, input_ids):
            return self.head(input_ids)

    batch = {"input_ids": X, "labels": Y["regression"]}
    la = Laplace(Named(), "regression").fit([batch])
    made = la.conformal([batch])
    assert made.n_calibration == 200
    assert made.coverage_test([batch]).coverage == pytest.approx(0.9, abs=0.02)
    with pytest.raises(MissingKeyError, match="label key"):
        la.conformal([{"input_ids": X}])
    kept = torch.arange(200) % 3 != 0
    masked = la.conformal([{**batch, "mask": kept}])  # as for la.fit and la.calibrate
    assert masked.n_calibration == int(kept.sum())
    assert torch.equal(masked.threshold(), la.conformal((X[kept], Y["regression"][kept])).threshold())
    with pytest.raises(InputError, match=r"a mask of shape \(2,\)"):
        la.conformal([{**batch, "mask": kept[:2]}])
    with pytest.raises(UnsupportedError, match="has weights"):
        la.conformal([{**batch, "weights": torch.ones(200)}])


class Ensemble:
    """Another source of predictions: the mean of two networks' outputs, with their spread."""

    def __init__(self, first, second):
        self.first, self.second = first, second
        self.likelihood, self.n_outputs, self.frame = first.likelihood, first.n_outputs, first.frame
        self.noise_level, self.softmax_temperature = first.noise_level, 1.0

    def outputs(self, inputs, need, answer=None):
        from laplace.inference.source import Part
        from laplace.predictive.outputs import OutputGaussian

        for one, other in zip(
            self.first.outputs(inputs, need, answer), self.second.outputs(inputs, need, answer), strict=True
        ):
            f, g = one.outputs, other.outputs
            spread = (f.mean - g.mean).square() / 2
            covariance = (f.covariance + g.covariance) / 2 + torch.diag_embed(spread)
            variance = covariance.diagonal(dim1=-2, dim2=-1)
            yield Part(one.positions, OutputGaussian((f.mean + g.mean) / 2, variance, covariance))

    def warn_once(self, key, message):
        warnings.warn(message, LaplaceWarning, stacklevel=2)


def test_any_source_can_be_calibrated(tmp_path):
    source = Ensemble(posterior("regression", 0), posterior("regression", 1))
    made = conformal(source, (X[80:140], Y["regression"][80:140]))
    assert made.coverage_test((X[140:], Y["regression"][140:])).p_value > 1e-3
    made.save(tmp_path / "ensemble")
    again = Conformal.load(tmp_path / "ensemble", source)
    assert torch.equal(again.interval(X)[0], made.interval(X)[0])


def test_a_network_with_one_number_per_example_gets_intervals_of_its_shape():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 1)

        def forward(self, x):
            return self.body(x).squeeze(-1)

    y = Y["regression"][:, 0]
    la = Laplace(Flat(), "regression", "all", class_dim=None).fit(X[:80], y[:80])
    low, high = la.conformal((X[80:], y[80:])).interval(X[:5])
    assert low.shape == high.shape == la.predict(X[:5]).mean.shape == (5,)


def test_positions_are_refused():
    la = Laplace(nn.Linear(3, 2), "classification").fit([(torch.randn(4, 6, 3), torch.randint(2, (4, 6)))])
    with pytest.raises(UnsupportedError, match="not exchangeable"):
        la.conformal([(torch.randn(4, 6, 3), torch.randint(2, (4, 6)))])


def test_only_the_generator_decides_random_sets():
    p, y = random_classes(300)
    made = from_predictions(classes(p), y, 0.7, "aps", generator=seeded())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = (made.set(classes(p), generator=seeded()) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, made.set(classes(p), generator=torch.Generator().manual_seed(5)))
    fixed = from_predictions(classes(p), y, 0.7, "aps", randomized=False)
    assert torch.equal(fixed.set(classes(p)), fixed.set(classes(p)))


def test_raps_is_its_formula():
    p, y = random_classes(50, 6)
    made = from_predictions(classes(p), y, 0.9, "raps", randomized=False, penalty=0.3, k_reg=2)
    scores = np.zeros((50, 6))
    for row, q in zip(scores, p.numpy(), strict=True):
        order = np.argsort(-q, kind="stable")
        for rank, k in enumerate(order, 1):
            row[k] = q[order[:rank]].sum() + 0.3 * max(rank - 2, 0)
    own = np.sort(scores[np.arange(50), y])[math.ceil(51 * 0.9) - 1]
    assert made.threshold().item() == pytest.approx(own)
    np.testing.assert_array_equal(made.set(classes(p)), scores <= own + 1e-12)
    plain = from_predictions(classes(p), y, 0.9, "aps", randomized=False)
    assert made.set(classes(p)).sum(1).max() <= plain.set(classes(p)).sum(1).max()


def test_empty_sets_get_the_most_probable_class_if_asked():
    p, y = random_classes(400, 3, sharp=4.0)
    made = from_predictions(classes(p), y, 0.4)
    empty = ~made.set(classes(p)).any(1)
    filled = made.set(classes(p), allow_empty=False)
    assert empty.any()
    assert torch.equal(filled[empty].long().argmax(1), p[empty].argmax(1))
    assert (filled[empty].sum(1) == 1).all()
    assert torch.equal(filled[~empty], made.set(classes(p))[~empty])


def test_too_few_examples_give_infinite_sets_and_say_so():
    mean, std, y = random_regression(8)
    with pytest.warns(LaplaceWarning, match=r"level=0\.9 needs at least 9 calibration examples, there are 8"):
        made = from_predictions(regression(mean, std), y)
    low, high = made.interval(regression(mean, std))
    assert low.isneginf().all()
    assert high.isposinf().all()
    assert made.interval(regression(mean, std), 0.8)[0].isfinite().all()
    with pytest.warns(LaplaceWarning, match=r"level=0\.95 needs at least 19 .* all numbers, from minus"):
        made.interval(regression(mean, std), 0.95)
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        made.interval(regression(mean, std), 0.95)
    assert made.coverage_test(regression(mean, std), y).p_value == 1
    p, y = random_classes(40, 3)
    y[y == 2] = 1
    y[0] = 2
    with pytest.warns(LaplaceWarning, match="of each class: every set holds class 2"):
        made = from_predictions(classes(p), y, class_conditional=True)
    assert made.set(classes(p))[:, 2].all()
    assert not made.set(classes(p)).all()


@pytest.mark.parametrize("method", ["scaled", "absolute", "cqr"])
def test_half_an_interval_never_turns_inside_out(method):
    mean, std = torch.zeros(100, 1, dtype=torch.float64), torch.rand(100, 1, dtype=torch.float64) * 5
    low, high = from_predictions(regression(mean, std), 1e-3 * torch.randn(100, 1), 0.5, method).interval(
        regression(mean, std)
    )
    assert (low <= high).all()


def test_counts_have_whole_ends_from_zero_up():
    la = posterior("poisson")
    low, high = la.conformal((X[80:], Y["poisson"][80:])).interval(X)
    assert torch.equal(low, low.round())
    assert torch.equal(high, high.round())
    assert (low >= 0).all()


def test_a_changed_posterior_is_noticed(tmp_path):
    la = posterior("regression")
    made = la.conformal((X[80:], Y["regression"][80:]))
    made.save(tmp_path / "made")
    before = la.prior_precision.clone()
    la.prior_precision = 7.0
    with pytest.warns(StaleWarning, match="nothing is guaranteed"):
        made.interval(X[:3])
    with pytest.warns(StaleWarning, match="nothing is guaranteed"):
        made.coverage_test((X, Y["regression"]))
    with pytest.warns(StaleWarning, match="nothing is guaranteed"):
        Conformal.load(tmp_path / "made", la)
    la.prior_precision = before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.interval(X[:3])
        Conformal.load(tmp_path / "made", la).interval(X[:3])


def test_other_files_are_refused(tmp_path):
    la = posterior("regression")
    la.save(tmp_path / "la")
    with pytest.raises(CheckpointError, match="holds a posterior, and a conformal predictor is needed"):
        Conformal.load(tmp_path / "la", la)
    made = la.conformal((X[80:], Y["regression"][80:]))
    made.save(tmp_path / "made")
    whole = (tmp_path / "made").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError):
        Conformal.load(tmp_path / "cut", la)
    with pytest.raises(CheckpointError, match="holds a conformal predictor"):
        Laplace.load(tmp_path / "made", la.model)


@pytest.mark.parametrize(
    ("task", "options", "error", "match"),
    [
        ("regression", {"level": 1.0}, OptionError, "level=1.0 must lie strictly between 0 and 1"),
        ("regression", {"level": "high"}, OptionError, "level='high'"),
        ("regression", {"method": "lac"}, OptionError, "does not exist for regression; write one of"),
        ("classification", {"method": "scaled"}, OptionError, "does not exist for classes"),
        ("multilabel", {"method": "aps"}, OptionError, "does not exist for labels"),
        ("poisson", {"method": "cqr"}, OptionError, "does not exist for counts"),
        ("classification", {"penalty": 0.1}, OptionError, "penalty= goes with method='raps', not with 'lac'"),
        ("classification", {"method": "raps", "penalty": -1.0}, OptionError, "penalty=-1.0"),
        ("classification", {"method": "raps", "k_reg": 1.5}, OptionError, "k_reg=1.5"),
        ("classification", {"method": "aps", "randomized": "yes"}, OptionError, "randomized='yes'"),
        ("regression", {"randomized": True}, OptionError, "randomized= goes with method='aps' or 'raps'"),
        ("regression", {"class_conditional": True}, OptionError, "is for classes"),
        ("regression", {"levels": 0.9}, OptionError, "levels"),
    ],
)
def test_options_that_do_not_exist_are_refused(task, options, error, match):
    with pytest.raises(error, match=match):
        posterior(task).conformal((X, Y[task]), **options)


def test_data_that_does_not_fit_is_refused():
    la, y = posterior("classification"), Y["classification"]
    with pytest.raises(InputError, match="no example"):
        la.conformal([])
    with pytest.raises(InputError, match="no example"):
        la.conformal([(X[:0], y[:0])])
    with pytest.raises(InputError, match="has no labels"):
        la.conformal(X)
    with pytest.raises(InputError, match=r"batch 0: class labels lie in \[0, 9\]"):
        la.conformal((X, torch.arange(200) % 10))
    with pytest.raises(InputError, match="integers are needed"):
        la.conformal((X, y.float()))
    with pytest.raises(UnsupportedError, match="counts each once"):
        la.conformal([(X, y, torch.ones(200))])
    with pytest.raises(InputError, match="200 examples and y has 3 labels"):
        la.conformal(X, y=y[:3])
    with pytest.raises(InputError, match="3 labels for 200 predictions"):
        from_predictions(la.predict(X), y[:3])
    with pytest.raises(InputError, match="is no prediction"):
        from_predictions(X, y)
    with pytest.raises(InputError, match="NaN or infinite"):
        posterior("regression").conformal((X, torch.full((200, 2), torch.nan)))
    with pytest.raises(NotFittedError):
        Laplace(nn.Linear(3, 3), "classification").conformal((X, y))
    pairs = Laplace(nn.Linear(3, 1), "reward_modeling")
    with pytest.raises(UnsupportedError, match="does not predict y"):
        pairs.conformal((X, y))


def test_calls_of_the_wrong_kind_say_the_right_one():
    numbers = posterior("regression").conformal((X, Y["regression"]))
    sets = posterior("classification").conformal((X, Y["classification"]))
    with pytest.raises(UnsupportedError, match=r"Write \.interval\(x\)"):
        numbers.set(X)
    with pytest.raises(UnsupportedError, match=r"Write \.set\(x\)"):
        sets.interval(X)
    with pytest.raises(InputError, match="calibration was with one of regression"):
        numbers.interval(posterior("poisson").predict(X))
    with pytest.raises(InputError, match="has 1 outputs; calibration was with 2"):
        numbers.interval(regression(torch.zeros(3, 1), torch.ones(3, 1)))
    with pytest.raises(InputError, match=r"coverage_test\(prediction, y\)"):
        numbers.coverage_test(posterior("regression").predict(X))
    with pytest.raises(OptionError, match="level=2"):
        numbers.interval(X, 2)
    with pytest.raises(InputError, match="no example"):
        numbers.coverage_test([])


def test_links_of_your_own_are_used_but_not_saved(tmp_path):
    la = posterior("classification")
    link = la.likelihood.links["probit"]
    made = la.conformal((X, Y["classification"]), link_approx=link)
    named = la.conformal((X, Y["classification"]), link_approx="probit")
    assert torch.equal(made.set(X), named.set(X))
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        made.save(tmp_path / "made")


def test_calibrating_on_the_training_data_is_noticed():
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    la = Laplace(nn.Linear(3, 2), "classification").fit(x, y)
    with pytest.warns(LaplaceWarning, match="cal_loader holds the tensors that la was fitted on.*guarantee") as said:
        la.conformal((x, y))
    assert said[0].filename == __file__  # not a file of torch, whose decorator is around the call


@pytest.mark.filterwarnings("ignore:.*validation examples are few:laplace.errors.LaplaceWarning")
def test_calibrating_on_data_that_was_tuned_on_is_noticed():
    torch.manual_seed(0)
    x, y = torch.randn(100, 3), torch.arange(100) % 2
    held_out, other = TensorDataset(x[40:80], y[40:80]), (x[80:], y[80:])
    for how in ("calibrate", "validation"):
        la = Laplace(nn.Linear(3, 2), "classification").fit(x[:40], y[:40])
        loader = DataLoader(held_out, 20)
        la.calibrate(loader) if how == "calibrate" else la.tune(method=how, val_loader=loader)
        with pytest.warns(LaplaceWarning, match="cal_loader has the dataset that la was tuned on.*guarantee"):
            la.conformal(DataLoader(held_out, 10))
        assert copy.deepcopy(la).values.tuning_data is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            la.conformal(other)
