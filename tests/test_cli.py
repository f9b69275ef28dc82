"""The command line, run in this process."""

import json
import re
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from laplace import Laplace, cli, demo

ROWS = ["accuracy", "NLL", "ECE", "Brier"]
ROWS += [f"AUROC of {kind}: {by}" for kind in ("8, 9", "photos") for by in ("confidence", "epistemic")]
ROW = re.compile(rf"^    ({'|'.join(ROWS)}) +((?:(?:-|\d\.\d{{3}}[* ]) *){{4}})$", re.MULTILINE)


def rows(printed):
    """The table: for each noise and score, the values of the four methods and which are marked as best."""
    return [(name, cells.split()) for name, cells in ROW.findall(printed)]


def short(**changes):
    return demo.Settings(epochs=2, regression_epochs=50, **changes)


def test_demo_prints_one_row_per_score_and_saves_figures_and_reports(tmp_path, capsys):
    demo.run(tmp_path, short())
    printed = capsys.readouterr().out
    assert [name for name, _ in rows(printed)] == ROWS * 2
    for name in ("reliability.png", "regression.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / name) in printed
    for name in ("digits.html", "curve.html"):
        assert (tmp_path / name).read_text().startswith("<!doctype html>")
        assert (tmp_path / name).with_suffix(".json").exists()
        assert str(tmp_path / name) in printed
    assert "the truth lies in the inner band" in printed
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


def test_help_of_the_report_command_does_not_import_torch():
    code = "import sys, laplace_command as c\nsys.argv = ['laplace', 'report', '--help']\ntry:\n c.main()\n"
    code += "except SystemExit: pass\nprint([name for name in ('torch', 'laplace', 'numpy') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--ood NAME=FILE" in run.stdout
    assert run.stdout.splitlines()[-1] == "[]"


# ---- laplace report -------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, {outputs}))

not_a_network = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a network, a saved posterior, and the same data as .npz, .safetensors and .csv."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(1)
    x = torch.randn(60, 3)
    for name, y in (("classes", (x[:, 0] > 0).long()), ("numbers", x[:, :1] + 0.1 * torch.randn(60, 1))):
        module = f"nets_{name}"
        (tmp_path / f"{module}.py").write_text(MODEL.format(outputs=2 if name == "classes" else 1))
        sys.modules.pop(module, None)
        model = __import__(module).make()
        likelihood = "classification" if name == "classes" else "regression"
        Laplace(model, likelihood).fit([(x, y)]).save(tmp_path / f"{name}.posterior")
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=y.numpy())
        save_file({"x": x, "y": y}, tmp_path / f"{name}.safetensors")
        rows = zip(x.tolist(), y.flatten().tolist(), strict=True)
        words = [",".join(map(repr, [*row, label])) for row, label in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,c,label", *words]) + "\n")
    words = [f"{a!r},{b!r},{c!r},{'yes' if a > 0 else 'no'}" for a, b, c in x.tolist()]
    (tmp_path / "words.csv").write_text("\n".join(words) + "\n")
    return tmp_path


def reported(name, *more):
    return cli.main(["report", f"{name}.posterior", "--model", f"nets_{name}:make", "--out", "page.html", *more])


@pytest.mark.parametrize("name", ["classes", "numbers"])
def test_report_command_writes_the_same_page_from_every_kind_of_file(name, folder, capsys):
    found = []
    for kind in ("npz", "safetensors", "csv"):
        options = [
            "--test",
            f"{name}.{kind}",
            "--val",
            f"{name}.{kind}",
            "--ood",
            f"same={name}.{kind}",
            "--batch-size",
            "7",
        ]
        more = [] if kind != "csv" else ["--target", "label"]
        assert reported(name, *options, *more, "--shift", f"again={name}.{kind}") == 0
        data = json.loads((folder / "page.json").read_text())
        found.append([data["scores"]["Laplace"][key]["value"] for key in data["scores"]["Laplace"]])
        assert data["shifts"][0]["name"] == "again"
        assert {row["set"] for row in data["outside"]["rows"]} == {"same"}
    assert found[0] == found[1] == pytest.approx(found[2], rel=1e-6)
    assert data["feature_names"] == ["a", "b", "c"]
    assert "page.html" in capsys.readouterr().out
    assert (folder / "page.html").exists()


def test_report_command_takes_words_as_class_names(folder):
    assert reported("classes", "--test", "words.csv") == 0
    data = json.loads((folder / "page.json").read_text())
    assert data["class_names"] == ["no", "yes"]
    assert reported("classes", "--test", "classes.npz") == 0
    assert json.loads((folder / "page.json").read_text())["scores"] == data["scores"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--test", "nowhere.npz"], "nowhere.npz"),
        (["--test", "classes.txt"], "end in .npz, .safetensors or .csv"),
        (["--test", "classes.csv", "--target", "nothing"], "no column 'nothing'"),
        (["--test", "words.csv", "--classes", "maybe,no"], "'yes', which is none of"),
        (["--test", "classes.npz", "--ood", "classes.npz"], "NAME=FILE"),
        (["--test", "classes.npz", "--out", "page.pdf"], ".html"),
        (["--test", "classes.npz", "--level", "0.42"], "level"),
        (["--test", "classes.npz", "--batch-size", "0"], "--batch-size"),
        (["--test", "classes.npz", "--weights", "numbers.safetensors"], "cannot be loaded"),
        (["--test", "classes.npz", "--model", "nets_classes"], "MODULE:NAME"),
        (["--test", "classes.npz", "--model", "nets_classes:nothing"], "nothing"),
        (
            ["--test", "classes.npz", "--model", "nets_classes:torch.nn.Linear.__name__.upper"],
            "torch.nn.Module is needed",
        ),
        (["--test", "classes.npz", "--model", "nets_numbers:make"], "another network"),
        (["--test", "other.npz"], "the arrays a; x is needed"),
        (["--test", "ragged.csv"], "columns"),
        (["--test", "unlabelled.npz"], "no labels"),
        (["--test", "text.csv"], "numbers are needed"),
    ],
)
def test_mistakes_of_the_report_command_are_one_line(options, words, folder, capsys):
    (folder / "classes.txt").touch()
    np.savez(folder / "other.npz", a=np.zeros(3))
    np.savez(folder / "unlabelled.npz", x=np.zeros((3, 3), np.float32))
    (folder / "ragged.csv").write_text("1,2,3,0\n1,2,0\n")
    (folder / "text.csv").write_text("1,hello,3,0\n1,hello,3,0\n")
    assert reported("classes", *options) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("laplace: ")
    assert words in printed.err
    assert not (folder / "page.html").exists()
