"""The promises that hold for every network: it comes back as it was, batches do not matter, dtypes are kept."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace import Laplace
from laplace.errors import ModelError, StaleWarning
from networks import Residual, cut, make

STRUCTURES = ["full", "kron", "diag"]


def state(model):
    tensors = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    flags = [(p.requires_grad, p.grad) for p in model.parameters()]
    modes = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return tensors, flags, modes


def assert_untouched(model, before):
    tensors, flags, modes = before
    now = model.state_dict(keep_vars=True)
    assert all(now[k] is v and torch.equal(v, copy) for k, (v, copy) in tensors.items())
    assert [(p.requires_grad, p.grad) for p in model.parameters()] == flags
    assert [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == modes


def use_everything(la, x, y):
    la.fit(cut(x, y, 5))
    la.optimize_prior_precision()
    la(x)
    la(x, pred_type="nn")
    la.predict(x)
    la.functional_samples(x, "nn", 3)
    la.sample(2)
    return la


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_network_comes_back_as_it_was(training, task):
    model, x, y = make("residual", task)
    model.train(training)
    model.block[0].eval()
    model.stem.weight.requires_grad_(False)
    before = state(model)
    use_everything(Laplace(model, task), x, y)
    assert_untouched(model, before)


def test_the_network_runs_in_eval_mode():
    seen = []

    class Noticing(nn.Module):
        def forward(self, x):
            seen.append(self.training)
            return x

    model = nn.Sequential(Noticing(), nn.Dropout(0.9), nn.Linear(3, 2)).train()
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    use_everything(Laplace(model, "classification"), x, y)
    assert seen
    assert not any(seen)
    assert model.training


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_network_and_the_posterior_survive_an_exception(error):
    class Fails(nn.Module):
        armed = False

        def forward(self, x):
            if Fails.armed and len(x) == 3:
                raise error("stop")
            return x

    model = nn.Sequential(nn.Linear(4, 5), Fails(), nn.Linear(5, 3)).train()
    x, y = torch.randn(23, 4), torch.randint(3, (23,))
    la = Laplace(model, "classification").fit(cut(x, y, 5))
    evidence, before = float(la.log_marginal_likelihood()), state(model)
    Fails.armed = True
    raised = ModelError if error is ValueError else error
    for override in (True, False):
        with pytest.raises(raised, match="stop"):
            la.fit(cut(x, y, 5), override=override)
    with pytest.raises(raised, match="stop"):
        la(x[:3])
    assert_untouched(model, before)
    assert float(la.log_marginal_likelihood()) == evidence
    assert la(x[:2]).shape == (2, 3)


def test_other_threads_may_use_the_network_meanwhile():
    model, x, y = make("residual", "classification", n=64)
    expected = model(x)
    la = Laplace(model, "classification").fit(cut(x, y, 16))
    predicted = la(x)
    wrong, stop = [], threading.Event()

    def forward():
        while not stop.is_set():
            if not torch.equal(model(x), expected):
                wrong.append("forward")

    def predict():
        while not stop.is_set():
            if not torch.equal(la(x), predicted):
                wrong.append("predict")

    threads = [threading.Thread(target=f) for f in (forward, forward, predict)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        Laplace(model, "classification").fit(cut(x, y, 16))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    structure=st.sampled_from(STRUCTURES),
    task=st.sampled_from(["classification", "regression"]),
    curvature=st.sampled_from(["ggn", "ef"]),
)
def test_the_posterior_does_not_depend_on_batch_size_or_order(sizes, order, structure, task, curvature):
    model, x, y = make("wrapped", task)
    whole = Laplace(model, task, hessian_structure=structure, curvature=curvature).fit(cut(x, y, len(x)))
    index = list(range(len(x)))
    order.shuffle(index)
    parts = Laplace(model, task, hessian_structure=structure, curvature=curvature).fit(cut(x[index], y[index], sizes))
    torch.testing.assert_close(parts.log_marginal_likelihood(), whole.log_marginal_likelihood())
    torch.testing.assert_close(parts.posterior_covariance, whole.posterior_covariance)
    assert parts.n_data == len(x)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 12),
    inputs=st.integers(1, 4),
    features=st.integers(1, 6),
    outputs=st.integers(2, 5),
    structure=st.sampled_from(STRUCTURES),
    bias=st.booleans(),
)
def test_any_shape_gives_a_proper_posterior(n, inputs, features, outputs, structure, bias):
    torch.manual_seed(n)
    model = nn.Sequential(nn.Linear(inputs, features), nn.ReLU(), nn.Linear(features, outputs, bias=bias)).double()
    x, y = torch.randn(n, inputs, dtype=torch.float64), torch.randint(outputs, (n,))
    la = Laplace(model, "classification", hessian_structure=structure).fit(cut(x, y, 5))
    assert la.n_params == outputs * (features + bias)
    p = la(x)
    assert p.shape == (n, outputs)
    torch.testing.assert_close(p.sum(-1), torch.ones(n, dtype=torch.float64))
    values = torch.linalg.eigvalsh(la.posterior_covariance)
    assert float(values.min()) > 0
    assert float(values.max()) <= 1 + 1e-9  # data never widens the prior


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_fitting_on_parts_adds_up_to_the_whole(structure, task):
    model, x, y = make("mlp", task)
    whole = Laplace(model, task, hessian_structure=structure).fit(cut(x, y, 6))
    parts = Laplace(model, task, hessian_structure=structure)
    for a, b in ((0, 9), (9, 10), (10, 23)):
        parts.fit(cut(x[a:b], y[a:b], 4), override=False)
    torch.testing.assert_close(parts.log_marginal_likelihood(), whole.log_marginal_likelihood())
    torch.testing.assert_close(parts.posterior_covariance, whole.posterior_covariance)
    assert parts.n_data == whole.n_data == 23
    parts.fit(cut(x[:5], y[:5], 4))
    assert parts.n_data == 5


def test_only_what_was_seen_is_counted():
    model, x, y = make("mlp", "regression")
    dataset = TensorDataset(x, y)
    la = Laplace(model, "regression").fit(DataLoader(dataset, 5, drop_last=True))
    assert la.n_data == 20
    seen = Laplace(model, "regression").fit(cut(x[:20], y[:20], 5))
    torch.testing.assert_close(la.log_marginal_likelihood(), seen.log_marginal_likelihood())
    subset = DataLoader(dataset, 4, sampler=[3, 1, 4])
    assert Laplace(model, "regression").fit(subset).n_data == 3

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    assert Laplace(model, "regression").fit(DataLoader(Stream(), 5)).n_data == 23
    assert Laplace(model, "regression").fit(b for b in cut(x, y, 5)).n_data == 23


def test_fit_runs_the_network_once_per_batch_without_autograd():
    model, x, y = make("mlp", "classification")
    modes = []
    model[0].register_forward_hook(lambda m, a, o: modes.append((len(a[0]), torch.is_grad_enabled(), o.requires_grad)))
    Laplace(model, "classification").fit(cut(x, y, 10))
    assert [n for n, *_ in modes[:4]] == [5, 5, 5, 2]  # watched; to find the last layer; whether outputs are steady
    assert [n for n, *_ in modes[4:]] == [10, 10, 3]
    assert not any(grad for _, *grads in modes for grad in grads)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_dtypes_are_kept_and_half_precision_is_summed_in_float32(dtype, kept, structure):
    model, x, y = make("mlp", "regression")
    model, x, y = model.to(dtype), x.to(dtype), y.to(dtype)
    la = Laplace(model, "regression", hessian_structure=structure).fit(cut(x, y, 5))
    mean, covariance = la(x)
    assert mean.dtype == covariance.dtype == la.mean.dtype == la.sample(2).dtype == kept
    reference = Laplace(model.double(), "regression", hessian_structure=structure).fit(cut(x.double(), y.double(), 5))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(covariance.double(), reference(x.double())[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("call", ["sample", "functional_samples", "predictive_samples", "mc", "nn", "predict"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_given_generator_is_the_only_source_of_randomness(call, structure):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", hessian_structure=structure).fit(cut(x, y, 8))

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        if call == "sample":
            return la.sample(4, generator)
        if call in ("functional_samples", "predictive_samples"):
            return getattr(la, call)(x, n_samples=4, generator=generator)
        if call == "predict":
            return la.predict(x, n_samples=4, generator=generator).epistemic
        kind = {"pred_type": "nn"} if call == "nn" else {"link_approx": "mc"}
        return la(x, n_samples=4, generator=generator, **kind)

    before = torch.get_rng_state()
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_changed_weights_are_noticed_at_prediction():
    model, x, y = make("mlp", "classification")
    for layer in (2, 0):
        la = Laplace(model, "classification").fit(cut(x, y, 8))
        la(x)
        with torch.no_grad():
            model[layer].weight.add_(0.1)
        with pytest.warns(StaleWarning, match=r"since fit.*Call la\.fit again"):
            la(x)
        la(x)  # warned of once


def test_moved_statistics_are_noticed_and_copies_raise_no_false_alarm(recwarn):
    model, x, y = make("residual", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    expected = la(x)
    torch.testing.assert_close(copy.deepcopy(la)(x), expected)
    assert not [w for w in recwarn if issubclass(w.category, StaleWarning)]
    model.train()
    model(x)
    model.eval()
    with pytest.warns(StaleWarning, match="statistics"):
        la(x)


def test_hyperparameters_are_copied_from_the_user():
    model, x, y = make("mlp", "classification")
    precision = torch.tensor([1.0, 1.0], dtype=torch.float64)
    la = Laplace(model, "classification", prior_precision=precision).fit(cut(x, y, 8))
    evidence = float(la.log_marginal_likelihood())
    precision.mul_(100)
    assert la.prior_precision.tolist() == [1.0, 1.0]
    assert float(la.log_marginal_likelihood()) == evidence


def test_setting_the_temperature_needs_no_refit():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    la.log_marginal_likelihood()
    la.temperature = 10.0
    other = Laplace(model, "classification", temperature=10.0).fit(cut(x, y, 8))
    torch.testing.assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_float32_is_accurate_with_many_examples(structure):
    """The direction in which softmax is flat has no curvature; rounding there must not compete with the prior."""
    torch.manual_seed(0)
    x, y = torch.randn(500, 20), torch.randint(5, (500,))
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    batches = [(x * 3, y)] * 60
    single = Laplace(model, "classification", hessian_structure=structure).fit(batches)
    double = Laplace(copy.deepcopy(model).double(), "classification", hessian_structure=structure)
    double.fit([(a.double(), b) for a, b in batches])
    torch.testing.assert_close(single(x).double(), double(x.double()), atol=1e-4, rtol=0)
    a, b = (la.predict(inputs).epistemic.double() for la, inputs in ((single, x), (double, x.double())))
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-2)


def test_the_network_is_not_copied():
    model = nn.Linear(300, 2)
    la = Laplace(model, "classification").fit([(torch.randn(4, 300), torch.zeros(4, dtype=torch.long))])
    assert la.model is model
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    with pytest.warns(StaleWarning):
        torch.testing.assert_close(la(torch.randn(2, 300)), torch.full((2, 2), 0.5))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_setting_prior_noise_and_mean_needs_no_refit(structure):
    model, x, y = make("mlp", "regression")
    one = Laplace(model, "regression", hessian_structure=structure).fit(cut(x, y, 8))
    two = Laplace(
        model, "regression", hessian_structure=structure, prior_precision=3.0, sigma_noise=0.2, prior_mean=0.4
    )
    two.fit(cut(x, y, 8))
    float(one.log_marginal_likelihood())
    one.prior_precision, one.sigma_noise, one.prior_mean = 3.0, 0.2, 0.4
    torch.testing.assert_close(one.log_marginal_likelihood(), two.log_marginal_likelihood())
    torch.testing.assert_close(one(x)[1], two(x)[1])


def test_values_that_require_grad_are_never_cached():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression").fit(cut(x, y, 8))
    precision = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        la.log_marginal_likelihood(precision).backward()
    assert precision.grad is not None
    first = precision.grad.clone()
    la.log_marginal_likelihood().backward()  # the value is kept, its graph is not
    torch.testing.assert_close(precision.grad, 1.5 * first)


def test_enable_backprop_gives_gradients_in_the_inputs_and_only_then():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", enable_backprop=True).fit(cut(x, y, 8))
    new = x[:2].clone().requires_grad_()

    def variance(inputs):
        return la(inputs)[1].diagonal(dim1=1, dim2=2).sum()

    assert torch.autograd.gradcheck(variance, (new,))
    plain = Laplace(model, "regression").fit(cut(x, y, 8))
    assert not plain(new)[1].requires_grad


def test_predictions_work_inside_inference_mode():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    expected = la(x)
    with torch.inference_mode():
        torch.testing.assert_close(la(x.clone()), expected)


def test_to_moves_the_posterior_and_keeps_its_numbers():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 8))
    expected = la(x)
    assert la.to("cpu") is la
    torch.testing.assert_close(la(x), expected)
    moved = Laplace(model, "classification").fit(cut(x, y, 8)).to("meta")
    assert moved.mean.device.type == moved.prior_precision.device.type == "meta"
    assert all(v.device.type == "meta" for v in moved.posterior.fit.sums.values())


@pytest.mark.filterwarnings("ignore:the delta approximation")
def test_nothing_grows_with_examples_times_outputs_times_weights():
    """500 classes, 300 features, 64 predictions: a Jacobian would be 64 x 500 x 150,500 numbers, 19 GB."""
    torch.manual_seed(0)
    model = nn.Linear(300, 500)
    x, y = torch.randn(64, 300), torch.randint(500, (64,))
    la = Laplace(model, "classification").fit([(x, y)])
    biggest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                biggest = max(biggest, out.untyped_storage().nbytes() // out.element_size())
            return out

    with Watch():
        la(x)
        la(x, link_approx="delta")
        la.predict(x)
    assert 0 < biggest <= 4 * 64 * 500 * 100  # the draws of the entropies; nothing of N * C * P, nor of N * C * C


def test_residual_uses_batchnorm_statistics_of_eval_mode():
    torch.manual_seed(0)
    model = Residual(3).double().train()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(3, (9,))
    one = Laplace(model, "classification").fit(cut(x, y, 9)).log_marginal_likelihood()
    many = Laplace(model, "classification").fit(cut(x, y, 2)).log_marginal_likelihood()
    torch.testing.assert_close(one, many)
