"""Bad input: one clear error that says what came and what to write, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace, marglik_training
from laplace.errors import InputError, LaplaceError, ModelError, NotFittedError, OptionError, UnsupportedError
from networks import cut, make

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def net(outputs=3):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


@pytest.fixture
def la():
    return Laplace(net(), "classification").fit(cut(X, Y, 2))


@pytest.mark.parametrize(
    "ask",
    [
        lambda la: la(X),
        lambda la: la.predict(X),
        lambda la: la.sample(2),
        lambda la: la.functional_samples(X),
        lambda la: la.predictive_samples(X),
        lambda la: la.log_marginal_likelihood(),
        lambda la: la.optimize_prior_precision(),
        lambda la: la.posterior_precision,
        lambda la: la.mean,
        lambda la: la.state_dict(),
    ],
)
def test_nothing_can_be_asked_before_fit(ask):
    with pytest.raises(NotFittedError, match=r"Call la\.fit\(train_loader\) first"):
        ask(Laplace(net(), "classification"))


@pytest.mark.parametrize("loader", [[], iter([]), [(X[:0], Y[:0])]])
def test_an_empty_loader_is_an_error_and_the_posterior_stays(la, loader):
    evidence = float(la.log_marginal_likelihood())
    with pytest.raises(InputError, match="gave no example"):
        la.fit(loader)
    assert float(la.log_marginal_likelihood()) == evidence


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (Y.float(), r"dtype torch\.float32; integers are needed. Write y\.long\(\)"),
        (Y.bool(), r"dtype torch\.bool"),
        (Y.unsqueeze(1), r"shape \(2, 1\).*must be \(2,\)"),
        (nn.functional.one_hot(Y), r"shape \(2, 3\)"),
        (Y + 1, r"need labels in \[0, 2\]"),
        (Y - 1, r"need labels in \[0, 2\]"),
        (Y[:5], r"shape \(1,\).*must be \(2,\)"),
    ],
)
def test_wrong_class_labels_are_named_with_their_batch(la, y, says):
    evidence = float(la.log_marginal_likelihood())
    batches = [(X[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)]
    with pytest.raises(InputError, match=rf"batch \d: .*({says})"):
        la.fit(batches)
    assert float(la.log_marginal_likelihood()) == evidence


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (torch.randn(1), r"shape \(1,\), the outputs \(2, 1\); make them equal"),
        (torch.randn(6, 2), r"shape \(2, 2\)"),
        (torch.randn(6, 1, dtype=torch.complex64), "real numbers are needed"),
        (torch.full((6, 1), torch.nan), "NaN or infinite"),
        (torch.full((6, 1), torch.inf), "NaN or infinite"),
    ],
)
def test_wrong_regression_labels_are_named_with_their_batch(y, says):
    with pytest.raises(InputError, match=rf"batch 0: .*{says}"):
        Laplace(net(1), "regression").fit([(X[:2], y[:2]), (X[2:], y[2:])])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_outputs_are_named_with_their_batch_and_example(la, bad):
    x = X.clone()
    x[3] = bad
    with pytest.raises(InputError, match=r"batch 1: .*NaN or infinite values for 1 example, the first is number 1"):
        la.fit(cut(x, Y, 2))
    with pytest.raises(InputError, match="NaN or infinite"):
        la(x)
    assert la(X).isfinite().all()


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (X, "is a Tensor"),
        ((X, Y, Y, Y), "tuple of length 4"),
        ((X, {"a": 1}), "labels of batch 0 are a dict"),
        ({"x": X}, r"keys \['x'\].*dict_key_y"),
        (3, "is a int"),
    ],
)
def test_what_is_no_batch_is_said(batch, says):
    with pytest.raises(InputError, match=says):
        Laplace(net(), "classification").fit([batch])


def test_one_logit_is_no_classification():
    with pytest.raises(InputError, match=r"at least two logits.*\(2, 1\)"):
        Laplace(net(1), "classification").fit([(X[:2], Y[:2])])


def test_sequence_outputs_need_labels_at_their_positions():
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(InputError, match=r"labels have shape \(2,\); outputs of shape \(2, 5, 3\) need \(2, 5\)"):
        Laplace(model, "classification").fit([(torch.randn(2, 5, 4), Y[:2])])


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf, torch.tensor([1.0, -2.0]), "one", True])
def test_the_prior_precision_must_be_positive(la, value):
    for act in (
        lambda: Laplace(net(), "classification", prior_precision=value),
        lambda: setattr(la, "prior_precision", value),
        lambda: la.log_marginal_likelihood(prior_precision=value),
    ):
        with pytest.raises(OptionError, match="prior_precision"):
            act()
    assert float(la.prior_precision) == 1


@pytest.mark.parametrize("value", [0.0, -0.5, torch.nan, torch.tensor([1.0, -2.0]), torch.ones(1, 2)])
def test_the_noise_must_be_positive(value):
    with pytest.raises(OptionError, match="sigma_noise"):
        Laplace(net(1), "regression", sigma_noise=value)


def test_classification_has_no_noise(la):
    with pytest.raises(OptionError, match="no observation noise"):
        Laplace(net(), "classification", sigma_noise=0.5)
    with pytest.raises(OptionError, match="no observation noise"):
        la.sigma_noise = 2.0


def test_a_prior_of_the_wrong_length_says_which_are_right(la):
    with pytest.raises(
        OptionError, match=r"5 values; allowed are 1, 2 \(one per parameter tensor: 2.weight, 2.bias\) or 18"
    ):
        la.prior_precision = torch.ones(5)
    with pytest.raises(OptionError, match="prior_mean has 3 values; allowed are 1 or 18"):
        la.prior_mean = torch.zeros(3)
    with pytest.raises(OptionError, match="5 values"):
        Laplace(net(), "classification", prior_precision=torch.ones(5)).fit(cut(X, Y, 2))
    with pytest.raises(OptionError, match="scalar or a vector"):
        la.prior_precision = torch.ones(2, 2)
    with pytest.raises(OptionError, match=r"per weight \(18 values\) cannot be added to Kronecker factors"):
        la.prior_precision = torch.ones(18)
    with pytest.raises(OptionError, match="cannot be added to Kronecker factors"):
        Laplace(net(), "classification", prior_precision=torch.ones(18)).fit(cut(X, Y, 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"subset_of_weights": "first_layer"}, r"subset_of_weights='first_layer'.*'last_layer'"),
        ({"hessian_structure": "dense"}, r"hessian_structure='dense'.*'full', 'kron', 'diag'"),
        ({"curvature": "fisher"}, r"curvature='fisher'.*'ggn', 'sketch', 'mc', 'ef'"),
        ({"likelihood": "gamma"}, r"likelihood='gamma'.*'regression', 'classification'"),
        ({"damping": "some"}, r"damping='some'.*False, True, 'balanced'"),
        ({"hessian_structure": "diag", "damping": True}, "belongs to hessian_structure='kron'"),
        ({"hessian_structure": "diag", "rank": 3}, "rank=3 belongs to hessian_structure='kron' or 'inf' or 'lowrank'"),
        ({"tol": 0.1}, "tol=0.1 belongs to hessian_structure='lowrank'"),
        ({"hessian_structure": "lowrank", "rank": 3, "tol": 0.1}, "rank=3 and tol=0.1: give only one"),
        ({"hessian_structure": "lowrank", "rank": 0}, "rank=0 must be a whole number of at least 1"),
        ({"hessian_structure": "lowrank", "rank": 2.5}, "rank=2.5 must be a whole number"),
        ({"hessian_structure": "lowrank", "tol": 1.0}, "tol=1.0 must lie between 0 and 1"),
        ({"hessian_structure": "lowrank", "tol": 0}, "tol=0 must lie between 0 and 1"),
        ({"hessian_structure": "lowrank", "tol": "some"}, "tol='some' must lie between 0 and 1"),
        ({"temperature": 0}, "temperature must be positive"),
        ({"curvature_samples": 0}, "curvature_samples=0"),
        ({"backend": int}, "does not say which curvature"),
        ({"backend_kwargs": {"a": 1}}, "goes with backend"),
        ({"curvature_samples": 5}, "'ggn' draws nothing"),
        ({"temperature": torch.ones(2)}, "temperature has 2 values"),
        ({"memory_budget": -1}, "memory_budget=-1"),
        ({"subset_of_weights": "all", "curvature": "hessian"}, ".kron. cannot hold an exact Hessian"),
        ({"subnetwork_indices": [1]}, "subnetwork_indices= belongs to subset_of_weights='subnetwork'"),
        ({"prior_prec": 1.0}, "Laplace has no option 'prior_prec'"),
        ({"last_layer_name": 3}, "last_layer_name=3 must be the name of a module"),
        ({"damping": torch.ones(2)}, r"damping=tensor\(\[1\., 1\.\]\) is not an option"),
        ({"hessian_structure": "full", "seed": torch.ones(2)}, "belongs to hessian_structure='matrix_free' or 'gp'"),
        ({"backend_kwargs": torch.ones(2)}, "goes with backend"),
        ({"weight_sharing": "both"}, r"weight_sharing='both'.*'expand', 'reduce'"),
    ],
)
def test_an_unknown_option_lists_the_valid_ones(options, says):
    with pytest.raises(LaplaceError, match=says):
        Laplace(net(), options.pop("likelihood", "classification"), **options)


def test_wrong_calls_of_a_fitted_posterior(la):
    for act, says in [
        (lambda: la(X, link_approx="logit"), r"link_approx='logit'.*'probit', 'one_vs_rest', 'mc', 'bridge'"),
        (lambda: la(X, pred_type="mcmc"), r"pred_type='mcmc'.*'glm', 'nn'"),
        (lambda: la(X, joint=True), "joint=True is for regression"),
        (lambda: la(X, n_samples=0, link_approx="mc"), "n_samples=0"),
        (lambda: la.sample(-1), "n_samples=-1"),
        (lambda: la.sample(2, generator=3), "generator is a int"),
        (lambda: la.functional_variance(torch.zeros(2, 3, 7)), "must be P = 18"),
        (lambda: la.log_prob(torch.zeros(7)), "must be P = 18"),
        (lambda: la.fit(cut(X, Y, 2), override=False) and la.load_state_dict({}), "not the state of a Laplace"),
    ]:
        with pytest.raises(LaplaceError, match=says):
            act()


def test_the_model_must_be_a_module_and_return_a_tensor():
    with pytest.raises(OptionError, match=r"function; a torch\.nn\.Module is needed"):
        Laplace(lambda x: x, "classification")

    class Odd(nn.Module):
        def forward(self, x):
            return {"scores": x}

    with pytest.raises(LaplaceError, match=r"returned a dict with keys \['scores'\]"):
        Laplace(Odd(), "classification").fit([(X, Y)])


def test_accumulating_with_another_number_of_outputs_is_refused():
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(x)

    model = Switch()
    la = Laplace(model, "classification").fit(cut(X, Y, 2))
    model.fc = nn.Linear(4, 2)
    with pytest.raises(LaplaceError, match="since fit, and data at other weights cannot be added"):
        la.fit([(X, Y % 2)], override=False)
    assert la.n_data == 6


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda la: la(X.numpy().astype(str)), r"ndarray of dtype <U.* Numbers are needed"),
        (lambda la: la.predict(X.numpy().astype("datetime64[s]")), "ndarray of dtype datetime64.* Numbers are needed"),
        (lambda la: la(X[:, :3]), r"the network failed on a tensor of shape \(6, 3\) and dtype torch\.float32"),
        (lambda la: la(X.double()), r"dtype torch\.float64"),
        (lambda la: la((X, X)), "2 inputs, the first a tensor"),
        (lambda la: la(X, link="mc"), "no option 'link'"),
        (lambda la: la(X, X), r"pred_type= stands.*write la\(\(x1, x2\)\)"),
        (
            lambda la: marglik_training(la.model, torch.utils.data.TensorDataset(X, Y), "classification", n_epochs=1),
            r"single examples. Write DataLoader",
        ),
        (lambda la: la.fit(None), "the loader is a NoneType"),
        (lambda la: la.fit(cut(X, Y, 2), generator=0), "generator is a int"),
        (lambda la: setattr(la, "temperature", -1.0), "temperature must be positive"),
        (lambda la: la.load_state_dict(None), "a mapping is needed, as state_dict"),
        (lambda la: la.load_state_dict({k: v for k, v in la.state_dict().items() if "/A" not in k}), "damaged"),
        (lambda la: la(X, outputs=[0]), "for regression"),
        (lambda la: la(X, outputs=b"x"), r"outputs=b'x' must be indices"),
        (lambda la: la("x"), r"a builtins\.str \(a tensor is needed"),
        (lambda la: la.fit(torch.tensor(1.0)), "the loader is a Tensor"),
        (lambda la: la.log_prob([1.0]), r"\[1\.0\]; give a tensor of real numbers"),
        (lambda la: la.functional_variance(torch.ones(18) * 1j), "a tensor of real numbers"),
        (lambda la: la.predict(X).quantile("x"), "q='x' must be a number"),
        (lambda la: la.predict(X).quantile([]), r"q=\[\] must be a number"),
        (lambda la: la.predict(X).interval(None), "level=None must lie"),
    ],
)
def test_mistakes_at_the_door_are_named(la, act, says):
    evidence = float(la.log_marginal_likelihood())
    with pytest.raises(LaplaceError, match=says):
        act(la)
    assert float(la.log_marginal_likelihood()) == evidence


def test_a_loss_that_is_no_function_of_the_prediction_is_said(la):
    with pytest.raises(OptionError, match=r"function of \(probabilities, y\)"):
        la.optimize_prior_precision(method="gridsearch", val_loader=cut(X, Y, 2), loss=lambda p, y: p)


def test_errors_are_values_or_runtime_errors_too():
    assert issubclass(OptionError, ValueError)
    assert issubclass(InputError, ValueError)
    assert issubclass(NotFittedError, RuntimeError)
    assert issubclass(UnsupportedError, NotImplementedError)


def test_float32_inputs_keep_their_posterior_after_a_failed_refit():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression").fit(cut(x, y, 6))
    expected = la(x)[1]
    with pytest.raises(InputError):
        la.fit([(x[:3], y[:3]), (x[3:], y[3:] * torch.nan)])
    torch.testing.assert_close(la(x)[1], expected)


def test_a_list_of_inputs_and_labels_in_place_of_a_loader_is_told_apart():
    with pytest.raises(InputError, match=r"list of 2 arrays or tensors, as a batch is\. Write \[\(x, y\)\].*tuple"):
        Laplace(net(), "classification").fit([X, Y])


def test_an_option_of_another_approximation_says_which_one_this_is():
    with pytest.raises(OptionError, match=r"rank=5 .*'nystrom'; 'gp' with functional_approximation='sod' has no such"):
        Laplace(net(), "classification", "all", "gp", rank=5)


def test_a_precision_per_weight_names_all_structures_that_have_one(la):
    with pytest.raises(OptionError, match="'full', 'diag', 'block', 'inf' or 'lowrank'"):
        la.prior_precision = torch.ones(la.n_params)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_lazy_modules_are_refused_until_they_were_run(subset):
    lazy = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))
    with pytest.raises(ModelError, match=r"'0\.weight' and 3 more parameters have no shape yet.*Run the network"):
        Laplace(lazy, "classification", subset)
    lazy(X)
    assert Laplace(lazy, "classification", subset).fit(cut(X, Y, 2))(X).shape == (6, 3)


@pytest.mark.parametrize("error", [IndexError, KeyError, ValueError, AssertionError, ZeroDivisionError])
def test_whatever_a_network_raises_is_said_with_what_it_was_called_with(error):
    class Failing(nn.Linear):
        def forward(self, x):
            raise error("no such thing")

    with pytest.raises(ModelError, match=r"failed on a tensor of shape \(2, 4\).*no such thing") as raised:
        Laplace(Failing(4, 3), "classification", "all").fit(cut(X, Y, 2))
    assert isinstance(raised.value.__cause__, error)
