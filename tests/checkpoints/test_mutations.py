"""A file or a state that was changed is refused when it is loaded, or works: never a raw exception later."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, marglik_training
from laplace.checkpoints import container
from laplace.checkpoints.posteriors import KIND
from laplace.checkpoints.progress import KIND as FIT
from laplace.errors import LaplaceError
from mutations import mutated

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("classification", {"hessian_structure": "kron"}),
    ("classification", {"hessian_structure": "full", "prior_precision": torch.tensor([1.0, 2.0])}),
    ("regression", {"hessian_structure": "diag", "sigma_noise": 0.5}),
    ("regression", {"hessian_structure": "kron", "damping": True}),
    ("binary", {"hessian_structure": "ekfac"}),
    ("multilabel", {"hessian_structure": "inf"}),
    ("poisson", {"hessian_structure": "lowrank"}),
    ("heteroscedastic", {"hessian_structure": "block"}),
    ("classification", {"hessian_structure": "kron", "subset_of_weights": "all"}),
    ("regression", {"hessian_structure": "ekfac", "subset_of_weights": "all"}),
    ("classification", {"hessian_structure": "inf", "subset_of_weights": "all", "rank": 3}),
    ("regression", {"hessian_structure": "lowrank", "subset_of_weights": "all", "rank": 4}),
    ("classification", {"hessian_structure": "diag", "subset_of_weights": "all", "curvature": "ef"}),
    ("regression", {"hessian_structure": "gp", "subset_of_weights": "all"}),
    ("classification", {"hessian_structure": "gp", "functional_approximation": "nystrom", "subset_of_weights": "all"}),
    ("regression", {"hessian_structure": "gp", "functional_approximation": "variational", "subset_of_weights": "all"}),
    ("regression", {"hessian_structure": "full", "subset_of_weights": ["0.*"]}),
    ("regression", {"hessian_structure": "full", "subset_of_weights": "subnetwork", "subnetwork_indices": [1, 4, 9]}),
    ("regression", {"hessian_structure": "kron", "earlier": True}),
]


def labels(task: str, n: int, outputs: int) -> Tensor:
    if task == "classification":
        return torch.arange(n) % outputs
    if task in ("binary", "multilabel"):
        return (torch.arange(n * outputs).reshape(n, outputs) % 2).double()
    return torch.linspace(0, 3, n * outputs).double().reshape(n, outputs).round()


def fitted(task: str, options: dict[str, Any]) -> tuple[Laplace, nn.Module, Tensor]:
    torch.manual_seed(0)
    options = dict(options)
    earlier, index = options.pop("earlier", False), options.get("subnetwork_indices")
    if index is not None:
        options["subnetwork_indices"] = torch.tensor(index)
    outputs = {"classification": 3, "binary": 1, "heteroscedastic": 2}.get(task, 2)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    x = torch.randn(7, 2).double()
    y = labels(task, 7, 1 if task == "heteroscedastic" else outputs)
    la = Laplace(model, task, **options).fit([(x[:4], y[:4]), (x[4:], y[4:])])
    if earlier:
        la = Laplace(model, task, prior=la.as_prior(), **options).fit([(x, y)])
    return la, model, x


def use(la: Laplace, x: Tensor, path: Any) -> None:
    """Everything that a posterior is asked for."""
    la(x)
    la.predict(x, progress_bar=False)
    la.log_marginal_likelihood()
    la.functional_samples(x, n_samples=2)
    if not la.structure.functional:
        la.sample(2)
        la(x, pred_type="nn", n_samples=2, **({"link_approx": "mc"} if la.likelihood.links else {}))
    la.prior_precision = 2.0
    la.log_marginal_likelihood()
    la.save(path)
    la.state_dict(with_data=True)
    repr(la)


def outcome(load: Callable[[], Laplace], x: Tensor, path: Any, what: str) -> str:
    """'refused' at load, 'refused later' or 'works'; anything raw fails."""
    try:
        la = load()
    except LaplaceError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"{what}: {error!r} at load") from error
    try:
        use(la, x, path)
    except LaplaceError:  # inputs of kept points, or a number of outputs, which only the network can tell
        return "refused later"
    except Exception as error:
        raise AssertionError(f"{what}: loaded, then {error!r}") from error
    return "works"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", range(len(OPTIONS)))
@pytest.mark.parametrize("cases", [12, pytest.param(170, marks=pytest.mark.slow)])
def test_a_changed_file_is_refused_or_works(which, cases, tmp_path):
    la, model, x = fitted(*OPTIONS[which])
    la.save(tmp_path / "la", with_data=True)
    contents, rng = container.read(tmp_path / "la", KIND), random.Random(1000 * which + cases)
    seen: collections.Counter[str] = collections.Counter()
    for _ in range(cases):
        other, what = mutated(contents, rng, rng.choice([1, 1, 2]))
        container.write(tmp_path / "other", KIND, other)
        how = outcome(lambda: Laplace.load(tmp_path / "other", model), x, tmp_path / "again", what)
        seen[how] += 1
    assert seen["refused"] >= cases // 2
    assert seen["refused later"] <= 1 + cases // 50


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", range(len(OPTIONS)))
@pytest.mark.parametrize("cases", [8, pytest.param(120, marks=pytest.mark.slow)])
def test_a_changed_state_is_refused_or_works(which, cases, tmp_path):
    la, _, x = fitted(*OPTIONS[which])
    state, rng = la.state_dict(with_data=True), random.Random(1000 * which + cases)
    for _ in range(cases):
        other, what = mutated(state, rng, rng.choice([1, 1, 2]))

        def load(other: Any = other) -> Laplace:
            new, _, _ = fitted(*OPTIONS[which])
            new.load_state_dict(other)
            return new

        outcome(load, x, tmp_path / "again", what)


class Interrupted(Exception):
    pass


class Loader:
    """Batches that can be read again; the first reading stops after some, if asked to."""

    def __init__(self, batches: list[Any], after: int | None = None) -> None:
        self.batches, self.left = batches, after

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise Interrupted
            yield batch


FITS = [{"hessian_structure": "kron"}, {"hessian_structure": "full", "subset_of_weights": "all"},
        {"hessian_structure": "ekfac", "subset_of_weights": "all"}, {"hessian_structure": "lowrank", "rank": 3},
        {"hessian_structure": "diag", "curvature": "mc"}]  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", FITS, ids=lambda options: options["hessian_structure"])
@pytest.mark.parametrize("cases", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_a_changed_fit_in_progress_is_refused_or_goes_on(options, cases, tmp_path):
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1)).double()
    batches = [(part, part.sum(1).gt(0).long()) for part in x.split(2)]
    after = 9 if options["hessian_structure"] == "ekfac" else 4  # in its second run over the data
    path = tmp_path / "fit"

    def fit(loader: Loader) -> Laplace:
        la, generator = Laplace(network(), "classification", **options), torch.Generator().manual_seed(3)
        return la.fit(loader, checkpoint=path, every=1, generator=generator)

    with pytest.raises(Interrupted):
        fit(Loader(batches, after))
    contents = container.read(path, FIT)
    whole = path.read_bytes()
    rng = random.Random(cases)
    for _ in range(cases):
        path.write_bytes(whole)
        other, what = mutated(contents, rng, rng.choice([1, 1, 2]))
        container.write(path, FIT, other)
        outcome(lambda: fit(Loader(batches)), x, tmp_path / "again", what)
    path.write_bytes(whole)
    fit(Loader(batches))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cases", [25, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_scheduler", [False, True])
def test_a_changed_training_is_refused_or_goes_on(cases, with_scheduler, tmp_path):
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1)).double()
    batches, path = [(x, x.sum(1).gt(0).long())], tmp_path / "training"
    scheduler = {"scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR, "scheduler_kwargs": {"T_max": 9}}

    def train(epochs: int, model: nn.Module) -> Laplace:
        how = {"n_epochs": epochs, "checkpoint": path, "n_epochs_burnin": 0, "marglik_frequency": 1}
        return marglik_training(model, batches, "classification", **how, **(scheduler if with_scheduler else {}))[0]

    train(2, network())
    contents, rng = container.read(path, "state of marglik_training"), random.Random(cases)
    whole = path.read_bytes()
    for _ in range(cases):
        path.write_bytes(whole)
        other, what = mutated(contents, rng, rng.choice([1, 1, 2]))
        container.write(path, "state of marglik_training", other)
        model = network()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        if outcome(lambda model=model: train(3, model), x, tmp_path / "again", what) == "refused":
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), what
