"""Common slips get a LaplaceError that says what to write instead."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

from laplace import Laplace
from laplace.errors import InputError, LaplaceError, LaplaceWarning, ModelError, NumericalError, OptionError
from laplace.likelihoods import Categorical
from laplace.predictive import Link
from laplace.predictive.queries import Covariances
from laplace.priors import from_log_density
from laplace.rivals import SWAG, Ensemble, MCDropout
from laplace.structures import BlockDiagonal, DenseBlock, DiagBlock
from laplace.tuning import Method

torch.manual_seed(0)
X, Y = torch.randn(40, 3), torch.arange(40) % 2
IMAGES = torch.rand(4, 2, 5, 5)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.fixture(scope="module")
def la() -> Laplace:
    return Laplace(network(), "classification").fit([(X, Y)])


class Takes(nn.Module):
    """A network with a keyword of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, shift=0.0):
        return self.layer(x) + shift * 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda la: la.tune(val_loder=[(X, Y)]), r"^Laplace.tune has no option 'val_loder'. Did you mean 'val_loader'"),
        (lambda la: la.tune(method="x", turns=5), r"^Laplace.tune has no option 'turns'. See help\(Laplace.tune\)"),
        (lambda la: la.fit([(X, Y)], overide=False), r"^Laplace.fit has no option 'overide'. Did you mean 'override'"),
        (lambda la: la.predict(X, n_sample=10), r"no option 'n_sample', and the network takes.*mean 'n_samples'"),
        (lambda la: la(X, link_aprox="mc"), r"^Laplace.__call__ has no option.*Did you mean 'link_approx'"),
        (lambda la: la.functional_samples(X, n_sample=9), r"Did you mean 'n_samples'"),
        (lambda la: la.sample(n_sample=9), r"Did you mean 'n_samples'"),
        (lambda la: la.save("file", with_dta=True), r"Did you mean 'with_data'"),
        (
            lambda la: Laplace.load("file", network(), likelihod="x"),
            r"^Laplace.load has .*mean 'likelihood'",
        ),
        (lambda la: la.calibrate([(X, Y)], rul="best"), r"^Laplace.calibrate has no option 'rul'. Did you mean 'rule'"),
        (lambda la: la.calibrate(X, Y), r"write la.calibrate\(\(x, y\)\)"),
        (lambda la: la.conformal(X, Y), r"must be one number.*write la.conformal\(\(x, y\)\)"),
        (lambda la: la.conformal(X, Y.numpy()), r"write la.conformal\(\(x, y\)\)"),
        (lambda la: la.conformal(X, Y.tolist()), r"write la.conformal\(\(x, y\)\)"),
        (lambda la: la.tune(val_loader=[(X, Y)]), r"Write la.calibrate\(val_loader\), or la.tune\(method='validation'"),
        (lambda la: Laplace(network(), "classification", "all", "kfac"), r"Did you mean 'kron'\?"),
        (lambda la: Laplace(network(), "classification", "all", "KFAC"), r"Did you mean 'kron'\?"),
        (lambda la: Laplace(network(), "classification", "all", "diagonal"), r"Did you mean 'diag'\?"),
        (lambda la: Laplace(network(), "classification", "all", "low_rank"), r"Did you mean 'lowrank'\?"),
        (
            lambda la: Ensemble([network()]),
            r"^Ensemble: missing .*'likelihood'. Write Ensemble\(models, likelihood\)",
        ),  # type: ignore
        (lambda la: Ensemble([network()], "classification", weigths=[1]), r"^Ensemble has .*mean 'weights'"),  # type: ignore
        (lambda la: SWAG(network()), r"^SWAG: missing .*Write SWAG\(model, likelihood\)"),  # type: ignore
        (lambda la: MCDropout(network(), "classification", n_sample=3), r"^MCDropout has .*mean 'n_samples'"),  # type: ignore
        (lambda la: la.optimize_prior_precision(metod="CV"), r"Did you mean 'method'"),
        (lambda la: Laplace(network()), r"^Laplace: missing a required argument: 'likelihood'.*Laplace\(model, like"),  # type: ignore
        (lambda la: la.tune("prior_prec"), r"Did you mean 'prior_precision'"),
        (lambda la: la.tune(["prior_precision", "temperature"]), r"la.tune\('prior_precision', 'temperature'\)"),
        (lambda la: Laplace(network(), "clasification"), r"Did you mean 'classification'\? Valid: "),
        (lambda la: Laplace(network(), "x"), r"^(?!.*'ordinal').*Ordinal\(K\)"),
        (lambda la: Laplace(network(), "ordinal"), r"Ordinal\("),
        (lambda la: Laplace(network(), Categorical), r"is a class; give an object: Categorical\(\)"),  # type: ignore
        (lambda la: Laplace(network(), lambda f, y: f), r"is a function; write from_log_prob\(fn\)"),  # type: ignore
        (lambda la: la(X, link_approx=lambda f, v: f), r"write Link.of_variances\(fn\)"),
    ],
)
def test_a_misspelt_or_misplaced_option_is_named_with_the_right_one(la, call, message):
    with pytest.raises(OptionError, match=message):
        call(la)


def test_keywords_of_the_network_still_reach_it():
    la = Laplace(Takes(), "classification", "all", "diag").fit([(X, Y)])
    assert torch.equal(la.predict(X, shift=1.0).mean, la.predict(X).mean)
    with pytest.raises(OptionError, match="Did you mean 'n_samples'"):
        la.predict(X, n_sample=10)
    with pytest.raises(LaplaceError, match="no option 'zzz'"):
        la.predict(X, zzz=10)


def test_a_loader_that_shuffles_is_told_once():
    data = TensorDataset(X, Y)
    for loader in (
        DataLoader(data, 8, shuffle=True),
        DataLoader(data, 8, sampler=SubsetRandomSampler(range(20))),
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 8, drop_last=False)),
    ):
        la = Laplace(network(), "classification").fit(loader)
        with pytest.warns(LaplaceWarning, match=r"random order.*shuffle=False") as seen:
            _ = la.predict(loader), la.predict(loader)
        assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Laplace(network(), "classification").fit(loader).predict(DataLoader(data, 8))


def test_weights_that_are_nan_are_named():
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"first 5 examples: the network's outputs hold NaN.*weights 0.weight: "):
        Laplace(model, "classification").fit([(X, Y)])
    with pytest.raises(InputError, match=r"for 1 example, the first is number 1 of the batch\.$"):
        Laplace(network(), "classification").fit([(X.index_fill(0, torch.tensor([1]), torch.nan), Y)])


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(2, 3, 1)

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda la: la.fit([X, Y]), r"write \[\(x, y\)\]"),
        (lambda la: la.fit([(X, Y)], Y), r"write la.fit\(x, y\) if these are the labels"),
        (lambda la: la(DataLoader(TensorDataset(X, Y))), r"write la.predict\(loader\)"),
        (lambda la: la([(X, Y)]), r"write la.predict\(loader\)"),
        (lambda la: la(X.double()), r"weights are torch.float32; write x.float\(\)"),
        (lambda la: la.predict(np.full((4, 3), "a")), r"numbers are needed"),
        (
            lambda la: Laplace(network(), "classification").fit([{"inputs": X, "labels": Y}]),
            r"whole mapping.*keywords if forward names.*dict_key_x",
        ),
        (
            lambda la: Laplace(Segmenter(), "classification").fit([(IMAGES, IMAGES[:, 0].long())]),
            r"write class_dim=1",
        ),
        (
            lambda la: Laplace(nn.Sequential(network(), nn.Softmax(-1)), "classification").fit([(X, Y)]),
            r"a softmax is taken of it(?!.*last_layer_name)",
        ),
        (
            lambda la: Laplace(nn.Sequential(network(), nn.Sigmoid()), "multilabel").fit([(X, Y)]),
            r"a sigmoid is taken of it(?!.*last_layer_name)",
        ),
    ],
)  # fmt: skip
def test_inputs_of_another_kind_are_refused_with_what_to_write(la, call, message):
    with pytest.raises((InputError, ModelError, OptionError), match=f"(?i){message}"):
        call(la)


def test_outputs_that_are_probabilities_are_noticed_once():
    model = nn.Sequential(network(), nn.Softmax(-1))
    with pytest.warns(LaplaceWarning, match="takes logits") as seen:
        Laplace(model, "classification", "all", "diag").fit([(X, Y), (X, Y)])
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Laplace(network(), "classification", "all", "diag").fit([(X, Y)])


def block_diagonal(sums, block):
    kind = type("Own", (BlockDiagonal,), {"block_sums": lambda self, m: sums(m), "block": lambda self, *a: block(*a)})
    return Laplace(network(), "classification", "all", kind()).fit([(X, Y)]).posterior.gaussian


def squares(moments):
    return {"h": moments.squares()}


@pytest.mark.parametrize(
    ("sums", "block", "message"),
    [
        (lambda m: m.squares(), DiagBlock, r"Own.block_sums returned a Tensor; a mapping"),
        (squares, lambda s, shape, e: s["h"], r"Own.block returned a Tensor for '0.weight'; a Block"),
        (squares, lambda s, shape, e: DiagBlock(s["h"].reshape(shape), shape), r"DiagBlock.*\(5, 3\).*\(15,\)"),
        (squares, lambda s, shape, e: DiagBlock(s["h"].double(), shape), r"torch.float64.*\.to\(eigh.dtype\)"),
        (squares, lambda s, shape, e: DenseBlock(s["h"], shape, e.dtype), r"DenseBlock.*\(15, 15\)"),
    ],
)
def test_authors_of_structures_are_told_which_method_is_wrong(sums, block, message):
    with pytest.raises(OptionError, match=message):
        block_diagonal(sums, block)


def test_authors_of_tuning_methods_and_links_are_told_what_to_return(la):
    class One(Method):
        def tune(self, problem):
            problem.losses(problem.start)
            return problem.tuned("one")

    with pytest.raises(OptionError, match=r"problem.losses\(\[x\]\)"):
        la.tune(method=One())
    with pytest.raises(OptionError, match=r"returned \(40,\); one row per input, \(40, K\)"):
        la(X, link_approx=Link.of_variances(lambda f, v: f[:, 0]))
    with pytest.raises(NumericalError, match=r"link in link_approx= returned NaN"):
        la.predict(X, link_approx=Link.of_variances(lambda f, v: f * torch.nan))
    link = Link(lambda gaussian, draws: gaussian.covariance.diagonal(dim1=1, dim2=2), Covariances())
    assert torch.equal(la(X, link_approx=link), la(X, link_approx=Link(link.apply, Covariances)))


def test_a_priors_own_hyperparameters_are_named_in_the_warning():
    def log_density(theta, width):
        return -(1 + (theta / width) ** 2).log().sum()

    la = Laplace(nn.Linear(3, 2), "regression", "all", "full", prior=from_log_density(log_density, width=0.1))
    with pytest.warns(LaplaceWarning, match="other values of width may help"):
        la.fit([(X, X[:, :2])]).log_marginal_likelihood()


def test_summaries_count_one_output_and_leave_out_a_noise_that_there_is_not(la):
    one = Laplace(nn.Linear(3, 1), "regression").fit([(X, X[:, :1])])
    assert ", 1 output, " in repr(one)
    assert "on 1 example, " in repr(Laplace(nn.Linear(3, 1), "regression").fit([(X[:1], X[:1, :1])]))
    assert repr(one.predict(X[:1])).startswith("Prediction(1 input, 1 output, ")
    two = Laplace(nn.Linear(3, 2), "regression", sigma_noise=torch.tensor([0.1, 0.5]))
    assert "noise [0.1, 0.5]" in repr(two)
    assert "sigma_noise" not in repr(la.tune())
    assert "sigma_noise" in repr(one.tune("sigma_noise"))


class Both(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, left, right):
        return self.layer(left + right)


@pytest.mark.parametrize("name", ["__call__", "predict", "functional_samples", "predictive_samples"])
@pytest.mark.parametrize("second", [X, X.numpy()], ids=["a tensor", "an array"])
def test_a_second_input_goes_into_a_tuple(name, second):
    la = Laplace(Both(), "classification").fit([((X, X), Y)])
    with pytest.raises(OptionError, match=r"^a second tensor came after x.*write la\(\(x1, x2\)\)"):
        getattr(la, name)(X, second)
    assert la((X, X)).shape == (40, 2)


def test_labels_to_leave_out_are_named_by_ignore_index():
    y = torch.where(torch.arange(40) == 3, -100, Y)
    says = (
        r"lie in \[-100, 1\]; 2 outputs need labels in \[0, 1\]\. To leave .*write Categorical\(ignore_index=-100\)\.$"
    )
    with pytest.raises(InputError, match=says):
        Laplace(network(), "classification").fit([(X, y)])
    with pytest.raises(InputError, match=r"2 outputs need labels in \[0, 1\]\.$"):
        Laplace(network(), "classification").fit([(X, Y + 5)])
    with pytest.raises(
        InputError, match=r"To leave out the examples of label -1, write Categorical\(ignore_index=-1\)"
    ):
        Laplace(network(), "classification").fit([(X, Y - 1)])
    with pytest.raises(InputError, match=r"in \[0, 1\]\. If they count from 1, write y - 1\.$"):
        Laplace(network(), "classification").fit([(X, Y + 1)])


@pytest.mark.parametrize("label", [Y[0], 1], ids=["a tensor", "a number"])
def test_a_pair_of_one_example_is_said_to_be_one(label):
    with pytest.raises(InputError, match=r"the one label .*: a single example\. Write \(x\[0:1\], y\[0:1\]\)"):
        Laplace(network(), "classification").fit([(X[0], label)])


@pytest.mark.parametrize("label", [1, torch.tensor(1)], ids=["a number", "a tensor"])
def test_single_examples_in_a_list_need_a_collator(label):
    rows = [{"x": X[i], "labels": label} for i in range(4)]
    with pytest.raises(InputError, match=r"a single example\. .*la\.fit\(examples, collate_fn="):
        Laplace(Takes(), "classification").fit(rows)


def test_examples_that_torch_cannot_join_need_a_collator():
    class Ragged(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> dict[str, object]:
            return {"x": [1.0] * (i + 1), "labels": 0}

    with pytest.raises(InputError, match=r"cannot join .*la\.fit\(dataset, collate_fn="):
        Laplace(Takes(), "classification").fit(Ragged())


@pytest.mark.parametrize("x", [np.arange(6).reshape(2, 3), [[1, 2, 3]], torch.arange(6).reshape(2, 3)], ids=type)
def test_whole_numbers_as_features_get_a_dtype(la, x):
    with pytest.raises(ModelError, match=r"whole numbers; write x\.float\(\), or x\.astype\('float32'\)"):
        la.predict(x)
    with pytest.raises(ModelError, match=r"whole numbers; write x\.double\(\), or x\.astype\('float64'\)"):
        Laplace(network().double(), "classification").fit([(IMAGES.long()[:, :, 0, :3], Y[:4])])


def test_columns_with_missing_values_are_named(la):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": pandas.array([1, None], dtype="Int64"), "c": [1, 2]})
    with pytest.raises(InputError, match=r"^the columns b of a DataFrame have missing values"):
        la.predict(table)
