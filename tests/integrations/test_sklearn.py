"""The scikit-learn estimators equal the calls that they stand for, and work where estimators do."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from mapie.classification import SplitConformalClassifier
from mapie.regression import SplitConformalRegressor
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from laplace import Laplace
from laplace.errors import LaplaceError, ModelError, OptionError
from laplace.integrations.sklearn import LaplaceClassifier, LaplaceRegressor

pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")


@pytest.fixture(scope="module")
def diabetes():
    x, y = load_diabetes(return_X_y=True)
    return train_test_split(StandardScaler().fit_transform(x), y, random_state=0)


@pytest.fixture(scope="module")
def iris():
    data = load_iris()
    x, y = StandardScaler().fit_transform(data.data), data.target_names[data.target]
    return train_test_split(x, y, random_state=0, stratify=y)


class Net(nn.Module):
    def __init__(self, n_features=4, n_outputs=3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_features, 10), nn.ReLU(), nn.Linear(10, n_outputs))

    def forward(self, x):
        return self.layers(x)


def test_a_classifier_is_the_posterior_of_its_network(iris):
    x, new, y, labels = iris
    found = LaplaceClassifier(max_epochs=30, random_state=0, tune=None, prior_precision=2.0).fit(x, y)
    index = np.unique(y, return_inverse=True)[1]
    la = Laplace(found.module_, "classification", prior_precision=2.0).fit(x, index)
    p = found.predict_proba(new)
    np.testing.assert_allclose(np.exp(found.predict_log_proba(new)), p)
    np.testing.assert_allclose(p, la.predict(new).mean, rtol=1e-6)
    np.testing.assert_allclose(p.sum(1), 1)
    assert list(found.classes_) == ["setosa", "versicolor", "virginica"]
    assert set(found.predict(new)) <= set(found.classes_)
    assert found.score(new, labels) > 0.85


@pytest.mark.parametrize("targets", [1, 2])
def test_a_regressor_is_the_posterior_of_its_network_in_the_units_of_y(diabetes, targets):
    x, new, y, _ = diabetes
    y = y if targets == 1 else np.stack([y, 3 - y], 1)
    found = LaplaceRegressor(max_epochs=20, random_state=0).fit(x, y)
    scaled = ((y - y.mean(0)) / y.std(0)).reshape(len(y), -1)
    la = Laplace(found.module_, "regression").fit(x, scaled)
    la.tune()
    mean, std = found.predict(new, return_std=True)
    assert mean.shape == std.shape == (len(new),) if targets == 1 else (len(new), 2)
    wanted = la.predict(new)
    np.testing.assert_allclose(mean.reshape(len(new), -1), wanted.mean * y.std(0) + y.mean(0), rtol=1e-5)
    np.testing.assert_allclose(std.reshape(len(new), -1), wanted.std * y.std(0), rtol=1e-3)
    np.testing.assert_array_equal(found.predict(new), mean)


def test_draws_of_targets_have_the_moments_of_the_prediction(diabetes):
    x, new, y, _ = diabetes
    found = LaplaceRegressor(max_epochs=20, random_state=0).fit(x, y)
    drawn = found.sample_y(new[:6], n_samples=20_000, random_state=1)
    mean, std = found.predict(new[:6], return_std=True)
    assert drawn.shape == (6, 20_000)
    np.testing.assert_allclose(drawn.mean(1), mean, atol=4 * std.max() / np.sqrt(20_000))
    np.testing.assert_allclose(drawn.std(1), std, rtol=0.03)
    np.testing.assert_array_equal(found.sample_y(new[:6], 3, 1), found.sample_y(new[:6], 3, 1))
    assert LaplaceRegressor(max_epochs=1).fit(x, np.stack([y, y], 1)).sample_y(new[:6], 5).shape == (6, 2, 5)


@pytest.mark.parametrize(
    "module",
    [Net, Net(), functools.partial(Net, n_outputs=3), lambda n_features, n_outputs: Net(n_features, n_outputs)],
)
def test_a_module_may_be_a_class_a_factory_or_a_network_and_stays_as_it_was(module, iris):
    x, new, y, labels = iris
    state = {k: v.clone() for k, v in module.state_dict().items()} if isinstance(module, nn.Module) else {}
    found = LaplaceClassifier(module, max_epochs=40, random_state=0).fit(x, y)
    assert isinstance(found.module_, Net)
    assert found.score(new, labels) > 0.85
    assert all(torch.equal(module.state_dict()[key], value) for key, value in state.items())


def test_a_trained_module_is_taken_as_it_is(iris):
    x, new, y, _ = iris
    trained = LaplaceClassifier(Net, max_epochs=20, random_state=0).fit(x, y).module_
    found = LaplaceClassifier(trained, train=False).fit(x, y)
    assert found.module_ is trained
    la = Laplace(trained, "classification").fit(x, np.unique(y, return_inverse=True)[1])
    la.tune()
    np.testing.assert_allclose(found.predict_proba(new), la.predict(new).mean, rtol=1e-4)
    regressor = LaplaceRegressor(Net(4, 1), train=False).fit(x, x[:, 0] * 100 + 7)
    assert float(regressor.y_mean_[0]) == 0


def test_skorch_nets_are_trained_by_themselves(iris, diabetes):
    x, new, y, labels = iris
    net = NeuralNetClassifier(
        Net, criterion=nn.CrossEntropyLoss, max_epochs=60, lr=0.1, batch_size=16, train_split=None, verbose=0
    )
    found = LaplaceClassifier(net, random_state=0).fit(x, y)
    assert found.score(new, labels) > 0.85
    assert not hasattr(net, "module_")
    assert found.module_ is found.net_.module_
    x, new, y, truth = diabetes
    net = NeuralNetRegressor(lambda: Net(10, 1), max_epochs=40, lr=0.05, train_split=None, verbose=0)
    assert LaplaceRegressor(net, random_state=0).fit(x, y).score(new, truth) > 0.3
    softmax = NeuralNetClassifier(
        lambda: nn.Sequential(Net(), nn.Softmax(-1)), criterion=nn.CrossEntropyLoss, max_epochs=1, verbose=0
    )
    with pytest.raises(ModelError, match="softmax"):
        LaplaceClassifier(softmax).fit(iris[0], iris[2])


def test_a_skorch_net_whose_loss_takes_probabilities_is_refused(iris):
    for loss in ({}, {"criterion": nn.NLLLoss()}):  # NLLLoss is skorch's default
        with pytest.raises(OptionError, match=r"criterion=NLLLoss.*criterion=nn\.CrossEntropyLoss"):
            LaplaceClassifier(NeuralNetClassifier(Net, **loss, max_epochs=1, verbose=0)).fit(iris[0], iris[2])


def test_a_trained_skorch_net_is_taken_as_it_is(iris):
    x, new, y, _ = iris
    net = NeuralNetClassifier(Net, criterion=nn.CrossEntropyLoss, max_epochs=2, train_split=None, verbose=0)
    with pytest.raises(OptionError, match="a skorch net after its fit"):
        LaplaceClassifier(net, train=False).fit(x, y)
    net.fit(x.astype(np.float32), np.unique(y, return_inverse=True)[1])
    found = LaplaceClassifier(net, train=False).fit(x, y)
    assert found.module_ is net.module_
    np.testing.assert_allclose(
        found.predict_proba(new), LaplaceClassifier(net.module_, train=False).fit(x, y).predict_proba(new)
    )


def test_estimators_work_in_the_tools_of_scikit_learn(iris, diabetes):
    x, new, y, labels = iris
    pipeline = make_pipeline(StandardScaler(), LaplaceClassifier(max_epochs=20, random_state=0))
    assert cross_val_score(pipeline, x, y, cv=2).min() > 0.8
    grid = {"laplaceclassifier__hidden_sizes": [(5,), (20,)], "laplaceclassifier__prior_precision": [0.1, 1.0]}
    search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss").fit(x, y)
    assert search.best_estimator_.score(new, labels) > 0.8
    calibrated = CalibratedClassifierCV(LaplaceClassifier(max_epochs=20, random_state=0), cv=2).fit(x, y)
    assert calibrated.predict_proba(new).shape == (len(new), 3)
    frame = pd.DataFrame(x, columns=list("abcd"))
    found = LaplaceClassifier(max_epochs=5, random_state=0).fit(frame, pd.Series(y))
    assert list(found.feature_names_in_) == list("abcd")
    with pytest.raises(ValueError, match="feature names"):
        found.predict(frame.rename(columns={"a": "z"}))


def test_mapie_makes_conformal_intervals_and_sets_of_them():
    x, y = load_diabetes(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    x, rest, y, y_rest = train_test_split(x, y, test_size=0.6, random_state=0)
    cal, new, y_cal, truth = train_test_split(rest, y_rest, test_size=0.5, random_state=0)
    model = LaplaceRegressor(max_epochs=20, random_state=0).fit(x, y)
    conformal = SplitConformalRegressor(model, confidence_level=0.9, prefit=True).conformalize(cal, y_cal)
    _, interval = conformal.predict_interval(new)
    inside = (interval[:, 0, 0] <= truth) & (truth <= interval[:, 1, 0])
    assert 0.8 < inside.mean() <= 1
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    x, rest, y, y_rest = train_test_split(x, y, test_size=0.6, random_state=0)
    cal, new, y_cal, truth = train_test_split(rest, y_rest, test_size=0.5, random_state=0)
    classifier = LaplaceClassifier(max_epochs=20, random_state=0).fit(x, y)
    sets = SplitConformalClassifier(classifier, confidence_level=0.9, prefit=True).conformalize(cal, y_cal)
    found = sets.predict_set(new)[1][:, :, 0]
    assert found[np.arange(len(truth)), truth].mean() > 0.8


def test_validation_data_is_held_out_for_calibration(iris):
    x, new, y, _ = iris
    found = LaplaceClassifier(max_epochs=20, random_state=0, validation_fraction=0.3).fit(x, y)
    assert found.laplace_.n_data == len(x) - round(0.3 * len(x) + 0.5)
    assert found.predict_proba(new).shape == (len(new), 3)


def test_images_keep_their_dimensions():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 1, 6, 6)), np.arange(20) % 2
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    found = LaplaceClassifier(network, max_epochs=2, random_state=0).fit(x, y)
    assert found.predict_proba(x).shape == (20, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"module": 3}, "module=3 must be a torch.nn.Module"),
        ({"module": lambda n_features: n_features}, "made 4; a torch.nn.Module is needed"),
        ({"module": lambda a, b, c: Net()}, r"needs a, b, c; it is called with \(n_features, n_outputs\)"),
        ({"train": False}, "train=False needs module= a trained"),
        ({"train": 3}, "train=3 must be True or False"),
        ({"hidden_sizes": 50}, r"hidden_sizes=50 must be a sequence"),
        ({"max_epochs": 0}, "max_epochs=0 must be a whole number"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0 must be"),
        ({"validation_fraction": None}, "validation_fraction=None must be a number .*; 0 holds nothing out"),
        ({"validation_fraction": "a fifth"}, "validation_fraction='a fifth' must be a number"),
        ({"hessian_structure": "krom"}, "'krom' is not an option"),
        ({"tune": "magic"}, "'magic' is not an option"),
        ({"laplace_options": {"sigmanoise": 1}}, "sigma_noise"),
        ({"module": Net(4, 2)}, r"gives \(2, 2\) for 2 examples; \(2, 3\) is needed"),
    ],
)
def test_bad_options_are_said_when_fit_is_called(options, says, iris):
    x, _, y, _ = iris
    estimator = LaplaceClassifier(**{"max_epochs": 1, **options})
    with pytest.raises(LaplaceError, match=says):
        estimator.fit(x, y)


def test_too_many_outputs_and_one_class_are_said(iris):
    x, _, y, _ = iris
    with pytest.raises(OptionError, match="has 5 outputs; y needs 3"):
        LaplaceClassifier(Net(4, 5), train=False).fit(x, y)
    with pytest.raises(OptionError, match="y has one class"):
        LaplaceClassifier().fit(x, ["a"] * len(x))


def test_batches_of_one_example_are_trained_on():
    x = np.linspace(-1, 1, 12).reshape(-1, 1)
    y = (x[:, 0] > 0).astype(int)
    trained = LaplaceClassifier(hidden_sizes=(4,), max_epochs=40, batch_size=1, random_state=0).fit(x, y)
    assert trained.score(x, y) > 0.9


@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_a_misspelt_option_is_refused_by_the_public_name(kind):
    with pytest.raises(OptionError, match=rf"^{kind.__name__} has no option 'max_epoch'. Did you mean 'max_epochs'\?$"):
        kind(max_epoch=3)
    assert clone(kind(max_epochs=3)).max_epochs == 3


def test_arrays_that_cannot_be_written_to_are_no_reason_for_a_warning(iris):
    x, _, y, _ = iris
    x, z = x.copy(), x[:, 0].copy()
    x.flags.writeable = z.flags.writeable = False
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not writable")
        LaplaceRegressor(max_epochs=1).fit(pd.DataFrame(x, columns=list("abcd")), pd.Series(z))
        LaplaceRegressor(max_epochs=1, normalize_y=False).fit(x, z)
        LaplaceClassifier(max_epochs=1).fit(x, y)
