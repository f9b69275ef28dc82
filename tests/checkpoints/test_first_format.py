"""Files of the first format, as they were written then, stay readable.

They were written by this module: `python tests/checkpoints/test_first_format.py` writes those that are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.priors import CorrelatedGaussian, Prior, SmoothedLaplace, StudentT

FILES = Path(__file__).parents[1] / "files"


def exact(*shape: int, step: int) -> torch.Tensor:
    """Numbers that are the same on every machine."""
    return ((torch.arange(torch.Size(shape).numel()) * step) % 17 - 8).reshape(shape) / 8


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for step, p in zip((3, 5, 7, 11), model.parameters(), strict=True):
        p.data = exact(*p.shape, step=step)
    return model


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(exact(10, 3, step=13), torch.arange(10) % 2)]


def kron() -> Laplace:
    la = Laplace(network(), "classification", temperature=0.5).fit(data())
    la.prior_precision = torch.tensor([0.25, 4.0])
    return la


def tasks() -> Laplace:
    first = Laplace(network(), "regression", "all", "diag").fit([(x, exact(10, 2, step=9)) for x, _ in data()])
    la = Laplace(network(), "regression", "all", "diag", prior=first.as_prior(), sigma_noise=0.5)
    return la.fit([(x[:4], exact(4, 2, step=6)) for x, _ in data()])


def scattered() -> Laplace:
    options = {"subset_of_weights": "subnetwork", "subnetwork_indices": torch.tensor([0, 5, 17, 18, 24])}
    return Laplace(network(), "classification", hessian_structure="full", **options).fit(data())


def whole(structure: str, prior: Prior | None = None, **options: Any) -> Callable[[], Laplace]:
    """A regression over all weights."""

    def fitted() -> Laplace:
        density = {"prior_precision": 2.0} if prior is None else {"prior": prior}
        la = Laplace(network(), "regression", "all", structure, sigma_noise=0.5, **density, **options)
        return la.fit([(x, exact(10, 2, step=9)) for x, _ in data()])

    return fitted


WRITTEN = {
    "kron": kron,
    "tasks": tasks,
    "scattered": scattered,
    **{f"all-{name}": whole(name) for name in ("full", "block", "kron", "ekfac", "diag")},
    "all-inf": whole("inf", rank=5),
    "all-lowrank": whole("lowrank", rank=4),
    "all-gp": whole("gp", n_subset=6),
    "all-nystrom": whole("gp", functional_approximation="nystrom", rank=5),
    "all-variational": whole("gp", functional_approximation="variational", n_subset=10),
    "all-matrix_free": whole("matrix_free", rank=5),
    "student-t": whole("full", StudentT(df=5.0, scale=torch.tensor([1.0, 2.0, 1.5, 1.0]), mean=0.25)),
    "smoothed-laplace": whole("diag", SmoothedLaplace(scale=0.5, smoothing=0.25)),
    "correlated": whole("kron", CorrelatedGaussian({"0.weight": (torch.eye(4) + 1, 2 * torch.eye(3))}, strength=0.5)),
}


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "all-gp"])
def test_a_file_of_the_first_format_is_read(name):
    needs = {"data": WRITTEN[name]().training_data} if name == "all-matrix_free" else {}
    la, expected = Laplace.load(FILES / f"format-1-{name}.safetensors", network(), **needs), WRITTEN[name]()
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())
    x = exact(6, 3, step=4)
    torch.testing.assert_close(la(x), expected(x))
    assert la.n_data == expected.n_data


def test_a_gp_of_the_first_format_answers_as_the_version_that_wrote_it():
    """Its points were drawn in another way than today's, so that a fit of today has others."""
    la = Laplace.load(FILES / "format-1-all-gp.safetensors", network())
    assert float(la.log_marginal_likelihood()) == pytest.approx(-67.38473897272746)
    expected = torch.tensor([[1.523783803, 0.600860834], [0.143132225, 0.209400401], [0.216613844, 0.422314614]])
    torch.testing.assert_close(la(exact(6, 3, step=4), diagonal_output=True)[1][:3], expected)
    assert la.n_data == 10


if __name__ == "__main__":
    for name, make in WRITTEN.items():
        path = FILES / f"format-1-{name}.safetensors"
        if not path.exists():
            make().save(path, with_data=name == "all-gp")
