"""Progress bars appear where somebody watches and has to wait; the command line answers before torch is loaded."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from torch import nn

from laplace import Laplace, marglik_training
from laplace.errors import OptionError
from laplace.network import progress

X, Y = torch.randn(12, 3), torch.arange(12) % 2
LOADER = [(X[:6], Y[:6]), (X[6:], Y[6:])]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def calls():
    """Everything that takes progress_bar=, and the word that its bar shows."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    la = Laplace(net, "classification").fit(LOADER)
    return {
        "fit": lambda p: la.fit(LOADER, progress_bar=p),
        "predict": lambda p: la.predict([X, X], progress_bar=p),
        "validation": lambda p: la.tune(method="validation", val_loader=LOADER, grid_size=3, progress_bar=p),
        "valid": lambda p: la.calibrate(LOADER, progress_bar=p),
        "conformal": lambda p: la.conformal(LOADER, 0.5, progress_bar=p),
        "epoch": lambda p: marglik_training(nn.Linear(3, 2), LOADER, "classification", n_epochs=2, progress_bar=p),
    }


@pytest.mark.parametrize("name", ["fit", "predict", "validation", "valid", "conformal", "epoch"])
def test_a_bar_is_shown_in_a_terminal_after_a_while_and_otherwise_if_asked(monkeypatch, name):
    call = calls()[name]

    def shown(stream, value):
        monkeypatch.setattr(sys, "stderr", stream)
        call(value)
        return name in stream.getvalue()

    assert not shown(Terminal(), None)  # over in an instant
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert shown(Terminal(), None)
    assert not shown(io.StringIO(), None)  # a pipe or a file
    assert not shown(Terminal(), False)
    assert shown(io.StringIO(), True)


def test_what_progress_bar_may_be_is_said():
    with pytest.raises(OptionError, match="progress_bar='yes' must be True, False or None"):
        calls()["conformal"]("yes")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["--version"], []])
def test_help_loads_neither_torch_nor_the_library(arguments):
    code = f"""
import sys
sys.argv = ["laplace", *{arguments!r}]
from laplace_command import main
try:
    main()
except SystemExit as error:
    assert not error.code
heavy = ("torch", "numpy", "laplace", "tqdm", "safetensors", "matplotlib", "sklearn")
print([name for name in heavy if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
    assert "laplace" in run.stdout


def test_the_command_runs_the_library_when_it_is_needed(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    start = f"import sys; sys.argv = ['laplace', 'demo', '--out', {str(file)!r}]"
    code = f"{start}; from laplace_command import main; sys.exit(main())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "cannot make the directory" in run.stderr
