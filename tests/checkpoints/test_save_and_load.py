"""`la.save` and `Laplace.load`: a round trip changes no bit, and what does not fit is refused with what differs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from torch import nn

import oracle
from laplace import Categorical, Laplace
from laplace.checkpoints.state import state_without_inputs
from laplace.errors import CheckpointError, NotFittedError, OptionError, UnsupportedError
from laplace.network.pytree import tensors_in
from laplace.structures import STRUCTURES
from networks import CLOSED, cut, make

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")

KINDS = {name: {"hessian_structure": name} for name in CLOSED}
KINDS |= {
    "gp": {"hessian_structure": "gp", "n_subset": 7},
    "independent gp": {"hessian_structure": "gp", "n_subset": 6, "seed": 3, "independent_outputs": True},
    "nystrom": {"hessian_structure": "gp", "functional_approximation": "nystrom", "rank": 4},
    "variational": {"hessian_structure": "gp", "functional_approximation": "variational", "n_subset": 5},
    "damped kron": {"hessian_structure": "kron", "damping": True},
    "inf with a share": {"hessian_structure": "inf", "rank": 0.9},
    "lowrank with a tolerance": {"hessian_structure": "lowrank", "tol": 0.05},
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SUBSETS = ("last_layer", "all", "globs", "predicate", "subnetwork")


def subset_of(name, model):
    if name == "globs":
        return {"subset_of_weights": ["2", "*.bias"]}
    if name == "predicate":
        return {"subset_of_weights": lambda name, p: p.dim() == 2}
    if name == "subnetwork":
        return {"subset_of_weights": name, "subnetwork_indices": oracle.indices_of(model, lambda _, j: j % 3 == 0)}
    return {"subset_of_weights": name}


def flat(value):
    """All tensors in a state, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in flat(v)]
    return [t for v in value for t in flat(v)] if isinstance(value, (list, tuple)) else []


def assert_same(a, b, x):
    """Bit by bit the same state; what is computed of it may round, by where it lies and how vectors are sent back."""
    left, right = state_without_inputs(a), state_without_inputs(b)
    assert left.keys() == right.keys()
    for key, value in left.items():
        if key != "subset_of_weights":  # of a predicate, the names that it chose
            tensors = zip(flat(value), flat(right[key]), strict=True)
            assert all(s.dtype == t.dtype and torch.equal(s, t) for s, t in tensors), key
            assert flat(value) or value == right[key], key
    torch.testing.assert_close(a.log_marginal_likelihood(), b.log_marginal_likelihood(), rtol=1e-12, atol=0)
    old, new = (f if isinstance(f, tuple) else (f,) for f in (a(x), b(x)))
    for s, t in zip(old, new, strict=True):
        assert s.dtype == t.dtype
        torch.testing.assert_close(s, t)


def combinations():
    """Every structure with every subset quickly, in turn with each dtype and likelihood; all of them slowly."""
    ways = [*itertools.product(DTYPES, ("classification", "regression"))]
    for number, (kind, subset) in enumerate(itertools.product(KINDS, SUBSETS)):
        for i, way in enumerate(ways):
            yield pytest.param(kind, subset, *way, marks=[pytest.mark.slow] if i != number % len(ways) else [])


@pytest.mark.parametrize(("kind", "subset", "dtype", "task"), [*combinations()])
def test_a_round_trip_changes_no_bit(kind, subset, dtype, task, tmp_path):
    model, x, y = make("mlp", task)
    model, x = model.to(dtype), x.to(dtype)
    y = y if task == "classification" else y.to(dtype)
    if subset == "subnetwork" and not getattr(STRUCTURES.get(KINDS[kind]["hessian_structure"]), "scattered", True):
        pytest.skip("needs whole tensors")
    options = subset_of(subset, model) | KINDS[kind]
    la = Laplace(model, task, temperature=0.5, prior_precision=2.5, **options).fit(cut(x, y, 6))
    if task == "regression":
        la.sigma_noise = 0.3
    la.save(tmp_path / "la.safetensors")
    again = Laplace.load(tmp_path / "la.safetensors", model, data=cut(x, y, 4))
    assert_same(la, again, x)
    if la.structure.adds:
        for one in (la, again):
            one.fit(cut(x, y, 6), override=False)
        torch.testing.assert_close(la.log_marginal_likelihood(), again.log_marginal_likelihood())


@pytest.mark.parametrize("kind", ["full", "kron", "diag", "block"])
def test_the_prior_of_earlier_tasks_is_kept(kind, tmp_path):
    model, x, y = make("mlp", "classification")
    first = Laplace(model, "classification", hessian_structure=kind).fit(cut(x[:9], y[:9], 4))
    la = Laplace(model, "classification", hessian_structure=kind, prior=first.as_prior()).fit(cut(x, y, 6))
    la.prior_precision = torch.tensor([2.0, 3.0])
    la.save(tmp_path / "la.safetensors")
    again = Laplace.load(tmp_path / "la.safetensors", model)
    assert_same(la, again, x)
    third = [one.as_prior().log_prob(one.mean + 0.1) for one in (la, again)]
    assert torch.equal(*third)


def test_what_is_left_after_data_was_taken_out_is_kept(tmp_path):
    model, x, y = make("mlp", "classification")
    whole, part = (Laplace(model, "classification", hessian_structure="full").fit([(x[:n], y[:n])]) for n in (23, 9))
    (whole - part).save(tmp_path / "la.safetensors")
    assert_same(whole - part, Laplace.load(tmp_path / "la.safetensors", model), x)


def test_the_header_says_in_words_what_the_file_is(tmp_path):
    model, x, y = make("mlp", "classification")
    options = {"subset_of_weights": "last_layer", "hessian_structure": "kron", "curvature": "mc"}
    Laplace(model, "classification", **options, curvature_samples=2).fit(cut(x, y, 6)).save(tmp_path / "la")
    with safe_open(tmp_path / "la", framework="pt") as file:
        header = json.loads(file.metadata()["laplace"])
    assert header["format"] == 1
    told = header["contents"]["options"]
    assert {key: told[key] for key in options} == options
    assert told["curvature_samples"] == 2
    assert header["contents"]["network"]["2.weight"]["shape"] == [3, 7]
    assert [*tmp_path.iterdir()] == [tmp_path / "la"]  # nothing is left beside it
    (tmp_path / "plain").touch()
    assert (tmp_path / "la").stat().st_mode == (tmp_path / "plain").stat().st_mode


class Renamed(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.body, self.head = network[0], network[2]

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("kind", ["full", "kron", "ekfac", "gp"])
@pytest.mark.parametrize("subset", SUBSETS)
def test_renamed_modules_are_found(kind, subset, tmp_path):
    model, x, y = make("mlp", "classification")
    if kind in ("kron", "ekfac") and subset == "subnetwork":
        pytest.skip("needs whole tensors")
    la = Laplace(model, "classification", hessian_structure=kind, **subset_of(subset, model)).fit(cut(x, y, 6))
    la.save(tmp_path / "la")
    with pytest.raises(CheckpointError, match=r"'0.weight' is not in this network.*and 5 more.*names="):
        Laplace.load(tmp_path / "la", Renamed(model))
    data = cut(x, y, 6)
    again = Laplace.load(
        tmp_path / "la", Renamed(model), data=data, names={"0": "body", "2": "head", "2.bias": "head.bias"}
    )
    torch.testing.assert_close(again(x), la(x))
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    if kind == "kron":
        torch.testing.assert_close(again.fit(data).log_marginal_likelihood(), la.log_marginal_likelihood())
    wrapper = nn.Module()
    wrapper.net, wrapper.forward = model, lambda x: model(x)
    assert torch.equal(
        Laplace.load(tmp_path / "la", wrapper, data=data, names={"": "net"}).log_marginal_likelihood(),
        la.log_marginal_likelihood(),
    )
    with pytest.raises(OptionError, match="names= has 'nothing'; the file has no such parameter"):
        Laplace.load(tmp_path / "la", Renamed(model), names={"nothing": "body"})
    with pytest.raises(OptionError, match="the same name"):
        Laplace.load(tmp_path / "la", Renamed(model), names={"0": "2"})


def test_another_network_is_refused_with_what_differs(tmp_path):
    model, x, y = make("residual", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    la.save(tmp_path / "la")
    other = make("residual", "classification")[0]
    other.block[0].running_mean[0] += 1  # neither a parameter nor uncertain, and yet it changes all predictions
    with pytest.raises(CheckpointError, match=r"another network: 'block.0.running_mean' has other values\."):
        Laplace.load(tmp_path / "la", other)
    with pytest.raises(CheckpointError, match=r"'classifier.weight' has dtype float64 there and float32 here"):
        Laplace.load(tmp_path / "la", make("residual", "classification")[0].float())
    with pytest.raises(CheckpointError, match=r"'classifier.weight' has shape \(3, 5\) there and \(2, 5\) here"):
        Laplace.load(tmp_path / "la", make("residual", "regression")[0])
    assert torch.equal(Laplace.load(tmp_path / "la", make("residual", "classification")[0])(x), la(x))


def test_a_posterior_of_other_weights_is_not_saved(tmp_path):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification")
    with pytest.raises(NotFittedError):
        la.save(tmp_path / "la")
    la.fit(cut(x, y, 6))
    with torch.no_grad():
        model[2].bias += 1
    with pytest.raises(UnsupportedError, match="have changed since fit"):
        la.save(tmp_path / "la")
    la.fit(cut(x, y, 6))
    with torch.no_grad():
        model[0].bias += 1  # certain, but the features come from it
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="weights or statistics of the network have changed since fit"):
            la.save(tmp_path / "la")
    la.fit(cut(x, y, 6))
    model[0].bias.data.mul_(3.0)  # which no version tells
    with pytest.raises(UnsupportedError, match="weights or statistics of the network have changed since fit"):
        la.save(tmp_path / "la")


def test_buffers_that_a_state_does_not_hold_are_compared(tmp_path):
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.register_buffer("scale", torch.tensor(scale), persistent=False)

        def forward(self, x):
            return self.head(self.scale * x)

    torch.manual_seed(0)
    one, five = Scaled(1.0), Scaled(5.0)
    five.load_state_dict(one.state_dict())
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    Laplace(one, "classification").fit([(x, y)]).save(tmp_path / "la")
    with pytest.raises(CheckpointError, match="'scale' has other values"):
        Laplace.load(tmp_path / "la", five)
    five.scale = torch.ones(2)  # of another length: made on the way
    Laplace.load(tmp_path / "la", one)


@pytest.mark.parametrize("path", [None, 3, "", "a\0b"])
def test_a_path_is_a_path(path):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    with pytest.raises(OptionError, match=r"path=.* must name a file"):
        la.save(path)
    with pytest.raises(OptionError, match=r"path=.* must name a file"):
        Laplace.load(path, model)


def test_wrong_arguments_of_load_are_not_the_files_fault(tmp_path):
    model, x, y = make("mlp", "classification")
    Laplace(model, "classification").fit(cut(x, y, 6)).save(tmp_path / "la")
    with pytest.raises(OptionError, match="model is a NoneType"):
        Laplace.load(tmp_path / "la", None)
    for names in (["a"], {0: "0"}):
        with pytest.raises(OptionError, match="must be a mapping from old to new names"):
            Laplace.load(tmp_path / "la", model, names=names)


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / f".la.{int(gone.stdout)}-ab.tmp").touch()
    (tmp_path / f".la.{os.getppid()}-ab.tmp").touch()  # of a process that may be writing it
    la.save(tmp_path / "la")
    assert {path.name for path in tmp_path.iterdir()} == {"la", f".la.{os.getppid()}-ab.tmp"}


class Twice(Categorical):
    """A likelihood of a user's."""

    name = "twice"


def test_a_likelihood_of_ones_own_is_passed_again(tmp_path):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, Twice()).fit(cut(x, y, 6))
    la.save(tmp_path / "la")
    with pytest.raises(CheckpointError, match=r"'twice', because files hold no code.*likelihood="):
        Laplace.load(tmp_path / "la", model)
    with pytest.raises(CheckpointError, match="has the likelihood 'twice'; likelihood= is 'classification'"):
        Laplace.load(tmp_path / "la", model, likelihood="classification")
    assert torch.equal(Laplace.load(tmp_path / "la", model, likelihood=Twice())(x), la(x))


def test_training_data_is_in_the_file_only_when_asked_for(tmp_path):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", "all", "gp", n_subset=5).fit(cut(x, y, 6))
    la.save(tmp_path / "without")
    la.save(tmp_path / "with", with_data=True)
    held = {name: (tmp_path / name).read_bytes() for name in ("without", "with")}
    rows = [row.numpy().tobytes() for row in x]
    assert sum(row in held["with"] for row in rows) == 5
    assert not any(row in held["without"] for row in rows)
    assert_same(la, Laplace.load(tmp_path / "with", model), x)
    with pytest.raises(CheckpointError, match=r"needs 5 inputs of the training data, and does not hold them.*data="):
        Laplace.load(tmp_path / "without", model)
    for other in (x.flip(0), x[:12], x[:, [1, 0, 2, 3]], x.float()):
        with pytest.raises(CheckpointError, match="data= does not hold the 5 inputs"):
            Laplace.load(tmp_path / "without", model, data=cut(other, y[: len(other)], 6))


def test_points_in_mappings_are_found_again(tmp_path):
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, input_ids, attention_mask):
            return self.head((self.embed(input_ids) * attention_mask.unsqueeze(-1)).sum(1))

    torch.manual_seed(0)
    model = ByName().double()
    batches = [
        {"input_ids": torch.randint(9, (4, t)), "attention_mask": torch.ones(4, t), "labels": torch.randint(2, (4,))}
        for t in (3, 3, 5)
    ]
    la = Laplace(model, "classification", "all", "gp").fit(batches)
    la.save(tmp_path / "without")
    la.save(tmp_path / "with", with_data=True)
    for again in (Laplace.load(tmp_path / "without", model, data=batches), Laplace.load(tmp_path / "with", model)):
        assert_same(la, again, batches[0])


def test_a_file_takes_the_place_of_another_only_when_it_is_whole(tmp_path, monkeypatch):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    la.save(tmp_path / "la")
    before = (tmp_path / "la").read_bytes()

    def interrupted(tensors, path, metadata):
        path.write_bytes(before[:50])
        raise KeyboardInterrupt

    monkeypatch.setattr("laplace.checkpoints.container.save_file", interrupted)
    la.prior_precision = 7.0
    with pytest.raises(KeyboardInterrupt):
        la.save(tmp_path / "la")
    assert (tmp_path / "la").read_bytes() == before
    assert [*tmp_path.iterdir()] == [tmp_path / "la"]


def test_a_likelihood_with_options_is_found_and_one_with_others_is_refused(tmp_path):
    model, x, y = make("mlp", "classification")
    for likelihood, again in (
        (Categorical(), None),
        (Categorical(label_smoothing=0.1), None),
        (Categorical(label_smoothing=0.1), Categorical(label_smoothing=0.1)),
    ):
        la = Laplace(model, likelihood).fit(cut(x, y, 6))
        la.save(tmp_path / "la")
        assert torch.equal(Laplace.load(tmp_path / "la", model, likelihood=again)(x), la(x))
    for other in ("classification", Categorical(label_smoothing=0.2)):
        with pytest.raises(CheckpointError, match="smoothing"):
            Laplace.load(tmp_path / "la", model, likelihood=other)


def test_a_noise_per_output_is_in_the_file(tmp_path):
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression", sigma_noise=torch.tensor([0.1, 0.5])).fit(cut(x, y, 6))
    la.save(tmp_path / "la.safetensors")
    again = Laplace.load(tmp_path / "la.safetensors", model)
    torch.testing.assert_close(again.sigma_noise, la.sigma_noise)
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    torch.testing.assert_close(again.predict(x).total, la.predict(x).total)


def test_every_tensor_of_a_file_goes_to_the_networks_device(tmp_path, monkeypatch):
    model, x, y = make("mlp", "regression")
    Laplace(model, "regression", "all", "gp").fit(cut(x, y, 6)).save(tmp_path / "la", with_data=True)
    monkeypatch.setattr("laplace.checkpoints.posteriors.device_of", lambda model: torch.device("meta"))
    found = []
    monkeypatch.setattr(Laplace, "load_state_dict", lambda la, state: found.append(state))
    Laplace.load(tmp_path / "la", model)
    assert {tensor.device.type for tensor in tensors_in(found[0])} == {"meta"}
