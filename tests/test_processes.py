"""One of several processes that says nothing of the others is warned; with `group=` they fit together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace, marglik_training
from laplace.errors import ProcessesWarning


@pytest.fixture
def two_processes(monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


def data():
    torch.manual_seed(0)
    return nn.Linear(3, 2), [(torch.randn(8, 3), torch.arange(8) % 2)]


@pytest.mark.usefixtures("two_processes")
def test_it_is_said_once_with_what_to_write():
    model, loader = data()
    la = Laplace(model, "classification")
    with pytest.warns(ProcessesWarning, match=r"one of 2 processes.*group=torch.distributed.group.WORLD.*None") as said:
        la.fit(loader).fit(loader)
    assert len(said) == 1


@pytest.mark.usefixtures("two_processes")
def test_a_process_that_works_alone_on_purpose_is_not_warned(recwarn):
    model, loader = data()
    Laplace(model, "classification").fit(loader, group=None)
    marglik_training(model, loader, n_epochs=1, group=None)
    assert not [w for w in recwarn if w.category is ProcessesWarning]


@pytest.mark.usefixtures("two_processes")
def test_online_training_says_it_before_it_trains():
    model, loader = data()
    with pytest.warns(ProcessesWarning, match="the networks drift apart") as said:
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
