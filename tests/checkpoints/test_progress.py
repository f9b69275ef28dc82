"""`fit(checkpoint=)`: an interrupted fit goes on where it was, and ends with the posterior of one that was not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.checkpoints import container
from laplace.checkpoints.state import state_dict
from laplace.errors import CheckpointError, OptionError, UnsupportedError
from laplace.inference.accumulate import Accumulator
from networks import CLOSED, cut, make

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")


class Interrupted(Exception):
    pass


class Loader:
    """Batches that can be read again, and that stop the whole fit after so many."""

    def __init__(self, batches, after=None):
        self.batches, self.left = batches, after

    def __iter__(self):
        for batch in self.batches:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise Interrupted
            yield batch


def seeded():
    return torch.Generator().manual_seed(5)


def assert_same(a, b, exact):
    """Bit by bit, but for networks in which the cheaper way to send vectors is found by trying."""
    left, right = state_dict(a), state_dict(b)
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, torch.Tensor) and not key.endswith(("vectors", "left", "right")):  # these have a free sign
            assert torch.equal(value, right[key]) if exact else True
            torch.testing.assert_close(value, right[key], rtol=1e-7, atol=1e-9)
    assert a.n_data == b.n_data
    torch.testing.assert_close(a.log_marginal_likelihood(), b.log_marginal_likelihood(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("curvature", "subset"),
    [
        ("mc", "last_layer"),
        ("ggn", "all"),
        pytest.param("ggn", "last_layer", marks=pytest.mark.slow),
        pytest.param("mc", "all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("structure", CLOSED)
def test_an_interrupted_fit_ends_as_one_that_was_not(structure, curvature, subset, tmp_path):
    model, x, y = make("mlp", "classification")
    batches, path = cut(x, y, 3), tmp_path / "fit"  # 8 of them

    def fit(loader, generator, checkpoint=path):
        la = Laplace(model, "classification", subset, structure, curvature=curvature)
        return la.fit(loader, generator=generator, checkpoint=checkpoint, every=2)

    first = seeded()
    whole = fit(Loader(batches), first, tmp_path / "other")
    assert not any(tmp_path.iterdir())
    reads = 8 * int(whole.posterior.fit.sums.get("passes", whole.structure.passes))
    for after in sorted({1, 5, 8, reads - 3, reads}):
        again = seeded()
        if after < reads:
            with pytest.raises(Interrupted):
                fit(Loader(batches, after), again)
        assert path.exists() == (1 < after < reads)
        again = seeded()
        resumed = fit(Loader(batches), again)
        assert_same(whole, resumed, subset == "last_layer")
        assert torch.equal(again.get_state(), first.get_state())
        assert not any(tmp_path.iterdir())


def test_without_a_generator_the_draws_are_the_same_too(tmp_path):
    model, x, y = make("mlp", "classification")
    batches = cut(x, y, 3)

    def fit(after):
        la = Laplace(model, "classification", curvature="mc")
        return la.fit(Loader(batches, after), checkpoint=tmp_path / "fit", every=2)

    torch.manual_seed(1)
    whole = fit(None)
    torch.manual_seed(1)
    with pytest.raises(Interrupted):
        fit(6)
    torch.manual_seed(99)
    assert_same(whole, fit(None), exact=True)


def test_what_was_counted_is_not_run_again(tmp_path):
    model, x, y = make("mlp", "classification")
    sizes = []
    model[0].register_forward_hook(lambda m, args, out: sizes.append(len(args[0])))
    with pytest.raises(Interrupted):
        Laplace(model, "classification").fit(Loader(cut(x, y, 3), 7), checkpoint=tmp_path / "fit", every=3)
    sizes.clear()
    la = Laplace(model, "classification").fit(cut(x, y, 3), checkpoint=tmp_path / "fit", every=3)
    assert sizes[:4] == [3, 3, 3, 2]  # watched, the last layer is looked for, and whether the outputs are steady
    assert sizes[4:] == [3, 3, 2]  # the first batch is looked at, two are left of eight
    assert la.n_data == 23


def test_what_a_killed_process_left_beside_the_file_is_removed_with_it(tmp_path):
    model, x, y = make("mlp", "classification")
    (tmp_path / ".fit.1-ab.tmp").touch()
    (tmp_path / "fit.tmp").touch()  # somebody else's
    Laplace(model, "classification").fit(cut(x, y, 3), checkpoint=tmp_path / "fit", every=2)
    assert [path.name for path in tmp_path.iterdir()] == ["fit.tmp"]
    Laplace(model, "classification").fit(cut(x, y, 3), checkpoint=tmp_path / "no folder yet" / "fit")
    assert [path.name for path in tmp_path.iterdir()] == ["fit.tmp"]  # nothing was written in so few batches


def test_a_fit_that_adds_goes_on_too(tmp_path):
    model, x, y = make("mlp", "regression")
    expected, la = (Laplace(model, "regression", "all").fit(cut(x[:9], y[:9], 4)) for _ in range(2))
    expected.fit(cut(x, y, 3), override=False)
    before = float(la.log_marginal_likelihood())
    with pytest.raises(Interrupted):
        la.fit(Loader(cut(x, y, 3), 5), override=False, checkpoint=tmp_path / "fit", every=1)
    assert float(la.log_marginal_likelihood()) == before
    la.fit(cut(x, y, 3), override=False, checkpoint=tmp_path / "fit", every=1)
    assert_same(expected, la, exact=False)


@pytest.mark.usefixtures("gathering")
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_batches_that_are_run_together_go_on_in_the_same_groups(structure, tmp_path, monkeypatch):
    monkeypatch.setattr("laplace.backprop.network._NARROW", 2**8)
    model, x, y = make("mlp", "classification")
    options = {"subset_of_weights": "all", "hessian_structure": structure, "curvature": "mc"}
    whole = Laplace(model, "classification", **options).fit(cut(x, y, 1), generator=seeded())
    for after in (4, 11, 22, 30):
        loader = Loader(cut(x, y, 1), after)
        la = Laplace(model, "classification", **options)
        if after < 23 * la.structure.passes:
            with pytest.raises(Interrupted):
                la.fit(loader, generator=seeded(), checkpoint=tmp_path / "fit", every=2)
        la.fit(Loader(cut(x, y, 1)), generator=seeded(), checkpoint=tmp_path / "fit", every=2)
        assert_same(whole, la, exact=False)


class Routed(nn.Module):
    """A layer that sees some of the examples."""

    def __init__(self):
        super().__init__()
        self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        seen, x = x[:, 0] > 0, x.clone()
        x[seen] = torch.tanh(self.expert(x[seen]))
        return self.head(x)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_a_network_that_shows_another_side_later_goes_on(structure, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Routed().double()
    x, y = torch.randn(24, 4, dtype=torch.float64), torch.randint(2, (24,))
    x[:, 0] = x[:, 0].abs()  # the first two batches show a layer that sees all, and so do the last two
    x[8:16:2, 0] *= -1
    anew = []
    forget = Accumulator._forget
    monkeypatch.setattr(Accumulator, "_forget", lambda self: anew.append(bool(self._before)) or forget(self))
    whole = Laplace(model, "classification", "all", structure).fit(cut(x, y, 4))
    assert anew == [False]
    for after in (2, 5, 9, 12):  # readings: 3 until it is noticed, 6 anew, and 6 of a second run
        la = Laplace(model, "classification", "all", structure)
        with contextlib.suppress(Interrupted):
            la.fit(Loader(cut(x, y, 4), after), checkpoint=tmp_path / "fit", every=1)
        la.fit(Loader(cut(x, y, 4)), checkpoint=tmp_path / "fit", every=1)
        assert_same(whole, la, exact=False)
    assert (True in anew) == (structure == "ekfac")  # in its second run over the data


def interrupted(path, model, x, y, **options):
    with pytest.raises(Interrupted):
        Laplace(model, "classification", **options).fit(
            Loader(cut(x, y, 3), 5), checkpoint=path, every=2, generator=seeded()
        )


def test_a_checkpoint_of_something_else_is_refused_with_what_differs(tmp_path):
    model, x, y = make("mlp", "classification")
    path = tmp_path / "fit"
    interrupted(path, model, x, y)
    kept = path.read_bytes()

    def refused(words, model=model, x=x, y=y, generator=None, **options):
        la = Laplace(model, "classification", **options)
        with pytest.raises(CheckpointError, match=words):
            la.fit(cut(x, y, 3), checkpoint=path, generator=generator or seeded())
        assert not la.is_fitted
        assert path.read_bytes() == kept

    refused(r"structure \('kron' there, 'diag' here\)", hessian_structure="diag")
    refused(r"structure \('kron' there, 'kron, damping=True' here\)", damping=True)
    refused(r"curvature \('ggn' there, 'ef' here\)", curvature="ef")
    refused(r"subset_of_weights \('last_layer' there, 'all' here\)", subset_of_weights="all")
    refused(r"generator \(", generator=torch.Generator().manual_seed(6))
    refused(r"'0.weight' has other values", model=make("mlp", "classification", seed=1)[0])
    refused("first 4 batches are not those of this loader", x=x.flip(0))
    refused("first 4 batches are not those of this loader", y=1 - y.clamp(max=1))
    refused("first 4 batches are not those of this loader", x=x[:5], y=y[:5])
    changed = x.clone()
    changed[4, 2] += 1e-9
    refused("first 4 batches are not those of this loader", x=changed)
    with pytest.raises(CheckpointError, match="holds a fit in progress, and a posterior is needed"):
        Laplace.load(path, model)
    path.write_bytes(kept[:-9])
    with pytest.raises(CheckpointError, match="is damaged"):
        Laplace(model, "classification").fit(cut(x, y, 3), checkpoint=path, generator=seeded())


def test_a_posterior_is_not_taken_for_a_checkpoint_nor_overwritten(tmp_path):
    model, x, y = make("mlp", "classification")
    Laplace(model, "classification").fit(cut(x, y, 3)).save(tmp_path / "la")
    kept = (tmp_path / "la").read_bytes()
    with pytest.raises(CheckpointError, match="holds a posterior, and a fit in progress is needed"):
        Laplace(model, "classification").fit(cut(x, y, 3), checkpoint=tmp_path / "la")
    assert (tmp_path / "la").read_bytes() == kept


def test_what_cannot_be_is_refused(tmp_path):
    model, x, y = make("mlp", "classification")
    with pytest.raises(OptionError, match="every=0 must be a whole number"):
        Laplace(model, "classification").fit(cut(x, y, 3), checkpoint=tmp_path / "fit", every=0)
    with pytest.raises(UnsupportedError, match="files hold no data"):
        Laplace(model, "classification", hessian_structure="gp").fit(cut(x, y, 3), checkpoint=tmp_path / "fit")


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
from laplace import Laplace
from networks import cut, make

class Loader:
    read = 0
    def __init__(self, batches, dies):
        self.batches, self.dies = batches, dies
    def __iter__(self):
        for batch in self.batches:
            Loader.read += 1
            if Loader.read == self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

model, x, y = make("mlp", "classification")
structure, path, out, dies = sys.argv[1:]
la = Laplace(model, "classification", "last_layer", structure, curvature="sketch")
la.fit(Loader(cut(x, y, 2), int(dies)), checkpoint=path, every=3, generator=torch.Generator().manual_seed(2))
la.save(out)
"""


@pytest.mark.parametrize("structure", ["kron", pytest.param("ekfac", marks=pytest.mark.slow)])
def test_a_killed_process_is_taken_up_by_the_next(structure, tmp_path):
    tests = Path(__file__).parents[1]
    source = SCRIPT.format(tests=str(tests))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent / "src"), str(tests)])}

    def run(out, dies):
        arguments = [structure, str(tmp_path / "fit"), str(tmp_path / out), str(dies)]
        return subprocess.run([sys.executable, "-c", source, *arguments], env=environment, check=False).returncode

    assert run("never", 11) == -signal.SIGKILL
    assert (tmp_path / "fit").exists()
    assert run("resumed", 0) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["resumed"]
    model, x, y = make("mlp", "classification")
    expected = Laplace(model, "classification", "last_layer", structure, curvature="sketch").fit(
        cut(x, y, 2), generator=torch.Generator().manual_seed(2), checkpoint=tmp_path / "fit", every=3
    )
    assert_same(expected, Laplace.load(tmp_path / "resumed", model), exact=True)


def test_ctrl_c_leaves_the_object_and_the_network_as_they_were(tmp_path):
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    model, x, y = make("residual", "classification")
    model.train()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    la = Laplace(model, "classification", "all").fit(cut(x[:9], y[:9], 3))
    before = float(la.log_marginal_likelihood())

    class Pressed(Loader):
        def __iter__(self):
            for i, batch in enumerate(self.batches):
                if i == 4:
                    signal.raise_signal(signal.SIGINT)
                yield batch

    with pytest.raises(KeyboardInterrupt):
        la.fit(Pressed(cut(x, y, 3)), checkpoint=tmp_path / "fit", every=2)
    signal.signal(signal.SIGINT, usual)
    assert float(la.log_marginal_likelihood()) == before
    assert la.n_data == 9
    assert model.training
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    la.fit(cut(x, y, 3), checkpoint=tmp_path / "fit", every=2)
    assert_same(Laplace(model, "classification", "all").fit(cut(x, y, 3)), la, exact=False)


def test_other_weights_of_the_same_examples_are_noticed(tmp_path):
    model, x, y = make("mlp", "classification")
    path, la = tmp_path / "part", Laplace(model, "classification", "all", "diag")
    weights = torch.ones(len(x), dtype=x.dtype)
    batches = [(*pair, w) for pair, w in zip(cut(x, y, 3), weights.split(3), strict=True)]
    with contextlib.suppress(Interrupted):
        la.fit(Loader(batches, 4), checkpoint=path, every=1)
    assert path.exists()
    others = [(a, b, 2 * w) for a, b, w in batches]
    with pytest.raises(CheckpointError, match="other data"):
        la.fit(Loader(others), checkpoint=path, every=1)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_the_file_is_written_as_often_as_was_asked_however_small_the_batches(subset, gathering, tmp_path, monkeypatch):
    written, write = [], container.write

    def writing(path, kind, contents):
        written.append(contents["batches"])
        write(path, kind, contents)

    monkeypatch.setattr(container, "write", writing)
    model, x, y = make("mlp", "classification")
    Laplace(model, "classification", subset, "diag").fit([(x[:2], y[:2])] * 40, checkpoint=tmp_path / "fit", every=5)
    assert len(written) >= 4
    assert max(b - a for a, b in zip([0, *written], [*written, 40], strict=True)) <= 10


@pytest.mark.parametrize("structure", ["ekfac", "inf"])
@pytest.mark.parametrize("after", [5, 12])
def test_a_shuffled_loader_goes_on_in_its_second_reading(structure, after, tmp_path):
    model, x, y = make("mlp", "classification")

    def loader(left):
        own = torch.Generator().manual_seed(5)
        return Loader(DataLoader(TensorDataset(x, y), 3, shuffle=True, generator=own), left)

    whole = Laplace(model, "classification", "all", structure).fit(loader(None))
    with pytest.raises(Interrupted):
        Laplace(model, "classification", "all", structure).fit(loader(after), checkpoint=tmp_path / "fit", every=1)
    again = Laplace(model, "classification", "all", structure).fit(loader(None), checkpoint=tmp_path / "fit", every=1)
    torch.testing.assert_close(again.posterior_variance, whole.posterior_variance, rtol=1e-7, atol=1e-9)
    assert again.n_data == len(x)
