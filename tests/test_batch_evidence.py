"""Evidence by batches in `marglik_training`: the lower bound, the running sums, and how they move prior and noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
from exact import assert_close
from laplace import Laplace, marglik_training
from laplace.errors import CheckpointError, InputError, LaplaceWarning, NumericalError, OptionError, UnsupportedError
from laplace.network.batches import Batch
from laplace.online.batch_runs import BatchRuns
from laplace.online.bound import Bound, batch_bound
from laplace.online.running import Running
from laplace.priors import StudentT
from networks import cut, make
from test_marglik_training import Interrupted, Noisy, loader, small, wave

pytestmark = pytest.mark.filterwarnings("ignore:kron keeps:laplace.errors.LaplaceWarning")
STILL = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.0}}
SIGMA, T = 0.7, 0.8


def batches(la: Laplace, data) -> list[Batch]:
    return [*la.runner.batches(data, False, "train")]


def bounds(model, data, task: str, delta: Tensor, **options) -> tuple[list[float], list[int]]:
    """The estimate of each batch, and its size."""
    la = Laplace(model, task, "all", "full", temperature=T, **options)
    runs, n, found = BatchRuns(la.runner), sum(len(x) for x, _ in data), []
    sigma = torch.tensor(SIGMA if task == "regression" else 1.0, dtype=torch.float64)
    theta = [p.detach() for p in model.parameters()]
    scatter = sum(float(d * p.square().sum()) for d, p in zip(delta, theta, strict=True))
    for batch in batches(la, data):
        value, *_ = batch_bound(runs, batch, n, torch.Generator().manual_seed(0)).at(delta, sigma, T)
        found.append(float(value) - 0.5 * scatter)
    return found, [len(x) for x, _ in data]


def setting(network: str, task: str):
    model, x, y = make(network, task)
    names = [name for name, _ in model.named_parameters()]
    delta = torch.linspace(0.5, 2.0, len(names), dtype=torch.float64)
    each = torch.cat([d.expand(p.numel()) for d, p in zip(delta, model.parameters(), strict=True)])
    return model, x, y, names, delta, each, SIGMA if task == "regression" else 1.0


@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("network", ["mlp", "conv"])
def test_the_bound_is_the_evidence_summed_over_batches(network, task, curvature):
    model, x, y, names, delta, each, sigma = setting(network, task)
    (whole,), _ = bounds(model, [(x, y)], task, delta, curvature=curvature)
    full = oracle.fit(model, names, x, y, task, "full", curvature).evidence(each, sigma=sigma, temperature=T)
    assert_close(torch.tensor(whole, dtype=torch.float64), full)
    data = cut(x, y, [9, 5, 4])
    found, sizes = bounds(model, data, task, delta, curvature=curvature)
    mean = sum(value * n for value, n in zip(found, sizes, strict=True)) / sum(sizes)
    expected = oracle.evidence_of_parts(model, names, data, task, each, sigma, T, curvature)
    assert_close(torch.tensor(mean, dtype=torch.float64), expected)
    assert mean < float(full)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_sketch_takes_single_vectors_and_is_a_looser_bound(task):
    model, x, y, names, delta, each, sigma = setting("conv", task)
    (all_vectors,), _ = bounds(model, [(x, y)], task, delta, curvature="sketch", curvature_samples=10)
    expected = oracle.evidence_of_parts(model, names, [(x, y)], task, each, sigma, T, each_vector=True)
    assert all_vectors == pytest.approx(float(expected), rel=1e-8)
    (whole,), _ = bounds(model, [(x, y)], task, delta)
    assert all_vectors < whole
    la = Laplace(model, task, "all", "full", curvature="sketch")  # of both vectors, drawn one by one, the mean is right
    runs, (batch,), noise = BatchRuns(la.runner), batches(la, [(x, y)]), torch.tensor(sigma, dtype=torch.float64)
    drawn = {
        round(float(batch_bound(runs, batch, len(x), torch.Generator().manual_seed(k)).at(delta, noise, T)[0]), 9)
        for k in range(12)
    }
    scatter = 0.5 * float((each * torch.cat([p.detach().flatten() for p in model.parameters()]).square()).sum())
    assert len(drawn) == 2
    assert sum(drawn) / 2 - scatter == pytest.approx(all_vectors, rel=1e-8)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_slopes_of_the_bound_are_its_derivatives(task):
    model, x, y, _, delta, *_ = setting("mlp", task)
    la = Laplace(model, task, "all", "full")
    found = batch_bound(BatchRuns(la.runner), batches(la, cut(x, y, 8))[0], len(x))
    at = torch.cat([delta.log(), torch.tensor([-0.3], dtype=torch.float64)])

    def value(point: Tensor) -> float:
        return float(found.at(point[:-1].exp(), point[-1].exp(), T)[0])

    _, slopes, of_noise = found.at(delta, at[-1].exp(), T)
    steps = 1e-5 * torch.eye(len(at), dtype=torch.float64)
    expected = torch.tensor([(value(at + step) - value(at - step)) / 2e-5 for step in steps], dtype=torch.float64)
    if task == "classification":
        assert float(expected[-1]) == pytest.approx(0, abs=1e-9)
        expected = expected[:-1]
    else:
        slopes = torch.cat([slopes, of_noise.reshape(1)])
    assert_close(slopes, expected, tolerance=1e-6)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("sizes", [[40], [50, 30, 40]])
def test_running_sums_of_resting_weights_are_those_of_a_fit(structure, sizes, monkeypatch):
    seen = []
    move = Running.move
    monkeypatch.setattr(Running, "move", lambda self, *args: (move(self, *args), seen.append(self.last))[0])
    la, *_ = marglik_training(
        small(), cut(*wave(), sizes), "regression", structure, evidence="running", n_epochs=1, **STILL
    )
    fit = la.posterior.fit
    for own, other in ((seen[-1].fit.sums, fit.sums), (seen[-1].fit.data, fit.data)):
        assert own.keys() == other.keys()
        for key, value in other.items():
            assert_close(own[key], value)
    assert seen[-1].fit.n_data == 120


def test_with_all_data_in_one_batch_running_is_the_usual_way():
    data, options = (
        cut(*wave(), 120),
        {"n_epochs": 4, "optimizer_kwargs": {"lr": 0.0}, "optimizer_cls": torch.optim.SGD},
    )
    usual, _, evidences, _ = marglik_training(small(), data, "regression", n_hypersteps=10, lr_hyp=0.01, **options)
    found, _, others, _ = marglik_training(small(), data, "regression", evidence="running", lr_hyp=0.1, **options)
    assert_close(found.prior_precision, usual.prior_precision)
    assert_close(found.sigma_noise, usual.sigma_noise)
    assert others == pytest.approx(evidences)


def test_running_sums_lead_to_the_same_optimum():
    found = []
    for how in ({"marglik_frequency": 10}, {"evidence": "running", "marglik_frequency": 2}):
        la, *_ = marglik_training(small(), loader(), "regression", n_epochs=300, optimizer_kwargs={"lr": 1e-2}, **how)
        found.append((float(la.log_marginal_likelihood()), float(la.sigma_noise)))
        la.optimize_prior_precision(prior_structure="layerwise", tune_sigma_noise=True)
        assert float(la.log_marginal_likelihood()) - found[-1][0] < 0.3  # of the optimum at the final weights
    (usual, noise), (evidence, other) = found
    assert evidence == pytest.approx(usual, abs=2)
    assert other == pytest.approx(noise, rel=0.05)


def test_adam_on_the_bound_reaches_the_optimum_of_full_with_all_data_in_one_batch():
    la, _, evidences, _ = marglik_training(
        small(), cut(*wave(), 120), "regression", "full", evidence="bound", n_epochs=300, prior_structure="scalar",
        lr_hyp=0.05, **STILL,
    )  # fmt: skip
    assert la.prior_precision.dim() == 0
    value = float(la.log_marginal_likelihood())
    assert evidences[-1] == pytest.approx(value, abs=1e-3)
    la.optimize_prior_precision(tune_sigma_noise=True)
    assert float(la.log_marginal_likelihood()) == pytest.approx(value, abs=0.1)
    assert evidences[0] < value - 10


@pytest.mark.parametrize("evidence", ["running", "bound"])
def test_prior_and_noise_move_by_no_more_than_lr_hyp_every_few_batches(evidence):
    options = {"evidence": evidence, "marglik_frequency": 2, "lr_hyp": 0.02, "n_epochs": 3, "n_epochs_burnin": 1}
    la, _, evidences, _ = marglik_training(small(), loader(), "regression", **options)  # 3 moves in 6 batches
    moved = torch.cat([la.prior_precision.log(), la.sigma_noise.log().reshape(1)]).abs()
    assert 0.04 < float(moved.max()) <= 0.06 + 1e-9
    assert len(evidences) == 2
    la, *_ = marglik_training(small(), loader(), "regression", fix_sigma_noise=True, **options)
    assert float(la.sigma_noise) == 1


@pytest.mark.parametrize("evidence", ["running", "bound"])
def test_a_batch_is_run_at_the_weights_and_statistics_of_the_moment(evidence):
    torch.manual_seed(0)
    model = Noisy()
    x, y = wave(40)
    la = Laplace(model, "regression", "all", "kron")
    kinds = {"running": Running, "bound": Bound}
    schedules = [kinds[evidence](la, "scalar", True, 10, 0.1, 1, 0) for _ in range(2)]
    (batch,) = batches(la, [(x, y)])
    schedules[0].move(batch, 40)
    model.train()
    model(3 * x + 1)  # moves the statistics of BatchNorm
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1
        model.net[4].weight.data = 2 * model.net[4].weight.data  # other memory
    values = []
    for schedule in schedules:
        la.prior_precision, la.sigma_noise = 1.0, 1.0
        if isinstance(schedule, Running):
            schedule.averages, schedule.examples = {}, 0
        schedule.after_epoch(1, lambda: None)
        schedule.move(batch, 40)
        values.append(schedule.after_epoch(2, lambda: None))
    assert values[0] == pytest.approx(values[1], rel=1e-12 if evidence == "bound" else 1e-9)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("evidence", ["running", "bound"])
@pytest.mark.parametrize("k", [4, 8])
def test_an_interrupted_training_goes_on_to_the_same_end(evidence, k, tmp_path):
    def call(loader, file, **options):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(1)
        return marglik_training(
            Noisy(), loader, "regression", curvature="sketch", n_epochs=8, keep_best=True, checkpoint=file,
            generator=generator, **{"evidence": evidence, "marglik_frequency": 2} | options,
        )  # fmt: skip

    expected = call(Interrupted(loader(), 0), None)
    file = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        call(Interrupted(loader(), k), file)
    found = call(Interrupted(loader(), 0), file)
    assert found[2:] == expected[2:]
    for name, value in expected[1].state_dict().items():
        assert torch.equal(found[1].state_dict()[name], value)
    assert torch.equal(found[0].prior_precision, expected[0].prior_precision)
    assert torch.equal(found[0].sigma_noise, expected[0].sigma_noise)
    with pytest.raises(CheckpointError, match=rf"evidence \('{evidence}' there, 'epochs' here\)"):
        call(loader(), file, evidence="epochs")


@pytest.mark.parametrize("evidence", ["running", "bound"])
@pytest.mark.parametrize(
    ("structure", "subset", "prior_structure", "curvature"),
    [
        ("kron", "all", "scalar", "ef"),
        ("diag", "last_layer", "layerwise", "ggn"),
        ("full", "all", "layerwise", "sketch"),
    ],
)
def test_structures_subsets_and_curvatures_combine(evidence, structure, subset, prior_structure, curvature):
    model, x, y = make("mlp", "classification", n=60)
    options = {"subset_of_weights": subset, "prior_structure": prior_structure, "curvature": curvature}
    la, _, evidences, _ = marglik_training(
        model, cut(x, y, 20), "classification", structure, n_epochs=2, evidence=evidence, **options
    )
    assert la.prior_precision.numel() == {"scalar": 1, "layerwise": la.n_layers}[prior_structure]
    assert not torch.equal(la.prior_precision, torch.ones_like(la.prior_precision))
    assert len(evidences) == 2


def test_running_sums_tune_other_priors_and_those_of_earlier_tasks():
    data = cut(*wave(), 40)
    la, *_ = marglik_training(small(), data, "regression", "diag", n_epochs=2, evidence="running", prior=StudentT(1.0))
    assert isinstance(la.prior, StudentT)
    assert float(la.prior.hyperparameters["scale"].reshape(-1)[0]) != 1
    earlier = Laplace(small(), "regression", "all", "diag").fit(data)
    la, *_ = marglik_training(
        small(), data, "regression", "diag", n_epochs=2, evidence="running", prior=earlier.as_prior()
    )
    assert not torch.equal(la.prior_precision, earlier.prior_precision)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"evidence": "batches"}, OptionError, "evidence='batches' is not an option.*'epochs', 'running', 'bound'"),
        ({"evidence": "running", "hessian_structure": "gp"}, UnsupportedError, "'gp' depend on all data.*='epochs'"),
        ({"evidence": "running", "hessian_structure": "ekfac"}, UnsupportedError, "averages sums of batches"),
        (
            {"evidence": "bound", "hessian_structure": "diag", "prior": StudentT(1.0)},
            UnsupportedError,
            "needs a Gaussian prior.*evidence='running'",
        ),
        ({"evidence": "bound", "curvature": "mc"}, UnsupportedError, "no bound with curvature='mc'.*'sketch'"),
        ({"evidence": "bound", "n_hypersteps": 3}, OptionError, "n_hypersteps=3 is for Newton's method"),
        (
            {"evidence": "bound", "hessian_structure": "diag", "prior_structure": "diag"},
            UnsupportedError,
            "one kernel per tensor.*'scalar' or 'layerwise'",
        ),
    ],
)
def test_what_has_no_evidence_by_batches_is_refused(options, error, words):
    model = small()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(error, match=words):
        marglik_training(model, cut(*wave(), 40), "regression", n_epochs=1, **options)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("evidence", ["running", "bound"])
def test_wrong_data_and_idle_settings_are_told(evidence):
    data = cut(*wave(), 40)
    wrong = [data[0], (data[1][0], data[1][1] * float("nan"))]
    with pytest.raises(InputError, match="epoch 1, batch 1: the labels hold NaN"):
        marglik_training(small(), wrong, "regression", n_epochs=1, evidence=evidence)
    with pytest.warns(LaplaceWarning, match="never computed: 2 epochs with n_epochs_burnin=0 and marglik_frequency=7"):
        marglik_training(small(), data, "regression", n_epochs=2, evidence=evidence, marglik_frequency=7)
    with pytest.raises((InputError, NumericalError), match=r"epoch \d+.*: .*Take a smaller learning rate"):
        marglik_training(
            small(), data, "regression", n_epochs=200, evidence=evidence,
            optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 100.0},
        )  # fmt: skip
