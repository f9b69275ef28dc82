"""The command line, run in this process."""

import re
import sys
from importlib import metadata

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import laplace_cli as cli
from laplace import demo

ROWS = ["accuracy", "NLL", "ECE", "Brier"]
ROWS += [f"AUROC of {kind}: {by}" for kind in ("8, 9", "photos") for by in ("confidence", "epistemic")]
ROW = re.compile(rf"^    ({'|'.join(ROWS)}) +((?:(?:-|\d\.\d{{3}}[* ]) *){{4}})$", re.MULTILINE)


def rows(printed):
    """The table: for each noise and score, the values of the four methods and which are marked as best."""
    return [(name, cells.split()) for name, cells in ROW.findall(printed)]


def short(**changes):
    return demo.Settings(epochs=2, regression_epochs=50, **changes)


def test_demo_prints_one_row_per_score_and_saves_both_figures(tmp_path, capsys):
    demo.run(tmp_path, short())
    printed = capsys.readouterr().out
    assert [name for name, _ in rows(printed)] == ROWS * 2
    for name in ("reliability.png", "regression.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / name) in printed
    assert printed.isascii()
    assert max(map(len, printed.splitlines())) <= 100 + len(str(tmp_path))


def test_demo_marks_the_best_values_of_each_row(tmp_path, capsys):
    demo.run(tmp_path, short())
    for name, cells in rows(capsys.readouterr().out):
        known = [cell for cell in cells if cell != "-"]
        assert len(known) == (2 if "epistemic" in name else 4)
        values = [float(cell.rstrip("*")) for cell in known]
        best = min(values) if name in ("NLL", "ECE", "Brier") else max(values)
        assert [cell.endswith("*") for cell in known] == [value == best for value in values]


def test_demo_repeats_itself_given_its_seed_and_leaves_torch_as_it_was(tmp_path, capsys):
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    tables = []
    for seed in (3, 3, 4):
        demo.run(tmp_path, short(seed=seed))
        tables.append(rows(capsys.readouterr().out))
    assert tables[0] == tables[1] != tables[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_demo_command_shows_a_better_calibrated_network_and_doubt_in_the_gap(tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path / "new" / "folder"), "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    for noise, table in (("clean", rows(printed)[: len(ROWS)]), ("noisy", rows(printed)[len(ROWS) :])):
        network, scaled, tuned, calibrated = (float(cell.rstrip("*")) for cell in dict(table)["NLL"])
        assert tuned < network + 0.01
        assert calibrated < min(network, scaled) + 0.02
        if noise == "noisy":
            assert calibrated < network - 0.2
    seen, gap = (float(re.search(pattern, printed)[1]) for pattern in (r"(\S+) where there is", r"(\S+) in the gap"))
    assert gap > 3 * seen
    assert (tmp_path / "new" / "folder" / "reliability.png").exists()


@pytest.mark.parametrize(("module", "package"), [("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")])
def test_missing_package_is_named_with_the_extra_to_install(module, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message == f"laplace: the demo needs {package}: pip install 'laplace-redux[demo]'\n"


def test_output_that_cannot_be_a_directory_is_refused_before_training(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["demo", "--out", str(file)]) == 1
    captured = capsys.readouterr()
    assert str(file) in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("noise", ["-1", "inf", "much"])
def test_bad_noise_is_refused(noise, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", f"--noise={noise}"])
    assert stopped.value.code == 2
    assert "--noise" in capsys.readouterr().err


def test_version_is_that_of_the_installed_distribution(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "version", {"laplace-redux": "1.2.3"}.__getitem__)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == "laplace 1.2.3\n"


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out
