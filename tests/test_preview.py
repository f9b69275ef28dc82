"""`laplace.plan` says what each structure would take, without fitting anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace
from laplace.errors import InputError, OptionError
from laplace.structures import STRUCTURES


def network(hidden: int = 30) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def batch(n: int = 8):
    torch.manual_seed(1)
    return torch.randn(n, 20), torch.arange(n) % 3


def test_it_prints_a_table_of_all_structures(capsys):
    preview = laplace.plan(network(), batch(), "classification")
    printed = capsys.readouterr().out
    assert str(preview) in printed
    assert "723 uncertain weights in 4 tensors, 3 outputs" in printed
    for name in [*STRUCTURES, "gp"]:
        assert f"\n{name} " in printed
    assert [option.structure for option in preview] == [*STRUCTURES, "gp"]
    assert all(option.fits for option in preview)
    assert "fit: " in repr(preview)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "block"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_memory_is_what_a_fit_keeps_and_its_work_space(structure, subset, capsys):
    model = network(60)
    preview = laplace.plan(model, batch(), "classification", subset)
    kept = Laplace(model, "classification", subset, structure).fit([batch()]).coverage().bytes
    assert kept <= preview[structure].bytes <= 6 * kept


def test_what_does_not_fit_is_said(capsys):
    preview = laplace.plan(network(3000), batch(), "classification", memory_budget=2 * 10**9)
    assert not preview["full"].fits
    assert preview["kron"].fits
    assert "full" in str(preview)
    assert "no: too large" in str(preview)


def test_costs_grow_with_what_is_kept(capsys):
    exact = laplace.plan(network(), batch(), "classification", n_data=10**6)
    sketch = laplace.plan(network(), batch(), "classification", curvature="sketch", n_data=10**6)
    assert exact["diag"].epochs < exact["kron"].epochs < exact["full"].epochs
    assert all(sketch[name].epochs < exact[name].epochs for name in ("diag", "kron", "full"))
    few = laplace.plan(network(), batch(), "classification", n_data=10)
    assert few["full"].epochs > exact["full"].epochs  # the decomposition is shared by fewer examples


def test_a_structure_without_a_form_says_why(capsys):
    preview = laplace.plan(network(), batch(), "classification", curvature="hessian")
    assert "the exact Hessian has no form as 'kron'" in str(preview)
    assert not preview["kron"].fits
    assert preview["full"].fits


def test_nothing_is_touched(capsys):
    model = network().train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    laplace.plan(model, batch(), "classification")
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(not module._forward_hooks for module in model.modules())


def test_bad_input_is_refused():
    with pytest.raises(OptionError, match="n_data=0"):
        laplace.plan(network(), batch(), "classification", n_data=0)
    with pytest.raises(InputError, match="class labels lie in"):
        laplace.plan(network(), (batch()[0], batch()[1] + 7), "classification")
    with pytest.raises(InputError, match="batch 0"):
        laplace.plan(network(), batch()[0], "classification")
    with pytest.raises(KeyError):
        laplace.plan(network(), batch(), "classification")["none"]


def test_options_of_laplace_are_those_of_the_plan(capsys):
    indices = torch.tensor([0, 5, 600])
    preview = laplace.plan(network(), batch(), "classification", "subnetwork", subnetwork_indices=indices)
    assert "3 uncertain weights" in str(preview)
    assert preview["full"].fits
    assert "needs whole tensors" in str(preview)
    small, large = (laplace.plan(network(), batch(), "classification", rank=rank) for rank in (5, 50))
    assert small["lowrank"].bytes < large["lowrank"].bytes
    assert small["kron"].bytes == large["kron"].bytes
