"""Several processes: each keeps the posterior of its own batches and says so; together they are that of all data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace, marglik_training
from laplace.errors import ProcessesWarning

RANKS = """
import os, sys, warnings
import torch
from torch import distributed, nn
from laplace import Laplace
from laplace.errors import ProcessesWarning

torch.set_num_threads(1)
other, path = os.fork(), sys.argv[1]  # what takes time is the import; nothing has run yet
rank = 0 if other else 1
distributed.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Linear(3, 2).double()
x, y = torch.randn(20, 3).double(), torch.arange(20) % 2
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    la = Laplace(model, "classification").fit([(x[rank::2], y[rank::2])])
(warning,) = [w for w in said if w.category is ProcessesWarning]
call = str(warning.message).split("after fit: ")[1].split(". If every")[0]
exec(call)  # what the warning says to write
whole = Laplace(model, "classification")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ProcessesWarning)
    whole.fit([(x, y)])
assert la.n_data == 20
torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
torch.testing.assert_close(la(x), whole(x))
distributed.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0, "the other process failed"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
def test_the_posteriors_of_two_processes_add_to_that_of_all_data_as_the_warning_says(tmp_path):
    source = str(Path(laplace.__file__).parents[1])
    program = f"import sys; sys.path.insert(0, {source!r})\n{RANKS}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def two_processes(monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


def data():
    torch.manual_seed(0)
    return nn.Linear(3, 2), [(torch.randn(8, 3), torch.arange(8) % 2)]


@pytest.mark.usefixtures("two_processes")
def test_it_is_said_once_and_what_does_not_add_is_not_added():
    model, loader = data()
    la = Laplace(model, "classification")
    with pytest.warns(ProcessesWarning, match=r"one of 2 processes.*la = sum\(parts\)") as said:
        la.fit(loader).fit(loader)
    assert len(said) == 1
    with pytest.warns(ProcessesWarning, match="sums of 'ekfac' cannot be added") as said:
        Laplace(model, "classification", hessian_structure="ekfac").fit(loader)


@pytest.mark.usefixtures("two_processes")
def test_online_training_says_it_before_it_trains():
    model, loader = data()
    with pytest.warns(ProcessesWarning, match="marglik_training in one process") as said:
        marglik_training(model, loader, n_epochs=1)
    assert len([w for w in said if w.category is ProcessesWarning]) == 1


def test_one_process_is_not_warned(recwarn, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model, loader = data()
    Laplace(model, "classification").fit(loader)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")  # a torch that was built without it
    Laplace(model, "classification").fit(loader)
    assert not [w for w in recwarn if w.category is ProcessesWarning]
