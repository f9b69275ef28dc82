"""What is no regular file is refused at once, whether it is read or written: nothing waits for a pipe's other end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from laplace import Laplace, marglik_training
from laplace.errors import CheckpointError

X, Y = torch.randn(6, 2), torch.arange(6) % 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def load(path: Path) -> None:
    Laplace.load(path, network())


def save(path: Path) -> None:
    Laplace(network(), "classification").fit([(X, Y)]).save(path)


def fit(path: Path) -> None:
    Laplace(network(), "classification").fit([(X, Y)] * 3, checkpoint=path, every=1)


def train(path: Path) -> None:
    marglik_training(network(), [(X, Y)], "classification", n_epochs=1, checkpoint=path)


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def folder_itself(folder: Path) -> Path:
    (folder / "sub").mkdir()
    return folder / "sub"


def link_to_pipe(folder: Path) -> Path:
    (folder / "link").symlink_to(pipe(folder))
    return folder / "link"


PLACES = {"pipe": pipe, "folder": folder_itself, "link": link_to_pipe, "device": lambda _: Path("/dev/zero")}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("call", [load, save, fit, train])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_refused_at_once(place, call, tmp_path):
    path, raised = PLACES[place](tmp_path), []
    before = path.lstat()

    def run() -> None:
        try:
            call(path)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits"
    assert [type(error) for error in raised] == [CheckpointError], raised
    assert "cannot be" in str(raised[0])
    after = path.lstat()
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
