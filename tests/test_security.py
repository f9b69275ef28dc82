"""Nothing in the library runs text or files as code, starts a process, or leans on an assert to refuse a mistake."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import laplace

FILES = sorted(Path(laplace.__file__).parent.rglob("*.py"))
BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {
    "pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "subprocess",
    "pty",
    "code",
    "runpy",
    "ctypes",
}
STARTS = ("system", "popen", "exec", "spawn", "fork", "startfile", "posix_spawn")  # of os


def offences(tree: ast.AST) -> Iterator[str]:
    """Whatever could run what is not in these files."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES or node.module == "os":
                yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            called = ast.unparse(node.func)
            if called in BUILTINS or (called.startswith("os.") and called[3:].startswith(STARTS)):
                yield called
            if called == "torch.load" and given.get("weights_only") != "True":
                yield "torch.load that may run code"
            if called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
                yield "numpy.load that may run code"
            if called.endswith("import_module") and not isinstance(node.args[0], ast.Constant):
                yield "an import by a name that is not written down"
            if called.endswith("CDLL") and [ast.unparse(arg) for arg in node.args] != ["None"]:
                yield "a foreign library"
            if given.get("shell", "False") != "False":
                yield "a shell"


def narrows(test: ast.expr) -> bool:
    """Whether an assert only tells a type checker what is known: a type, or whether there is anything."""
    if isinstance(test, ast.Compare):
        right = test.comparators[0]
        return isinstance(test.ops[0], (ast.Is, ast.IsNot)) and isinstance(right, ast.Constant) and right.value is None
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


ALLOWED = (
    # `laplace report --model MODULE:NAME` imports the network that the user names, as `python -m MODULE` would.
    ("commands/report.py", "an import by a name that is not written down"),
    # `CDLL(None)` is the process itself, whose malloc is asked to give back free memory. No file is opened.
    ("laplace/budget.py", "ctypes"),
)


def test_no_file_runs_text_or_foreign_files():
    assert len(FILES) > 50
    found = [(str(file), what) for file in FILES for what in offences(ast.parse(file.read_text()))]
    assert [(file, what) for file, what in found if not any(file.endswith(a) and what == b for a, b in ALLOWED)] == []


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "exec(text)",
        "import pickle",
        "import joblib.numpy_pickle",
        "from subprocess import run",
        "from os import system",
        "os.system('ls')",
        "os.execv(path, [])",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "import_module(name)",
        "ctypes.CDLL('libc.so.6')",
        "run('ls', shell=True)",
    ],
)
def test_what_is_looked_for_is_found(source):
    assert list(offences(ast.parse(source)))


def test_asserts_tell_types_and_nothing_else():
    ours = [file for file in FILES if file.parent.name != "testing"]  # test suites, in which an assert is a test
    asserts = [node for file in ours for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Assert)]
    assert asserts
    assert not [ast.unparse(node) for node in asserts if not narrows(node.test)]
    assert not narrows(ast.parse("x > 0", mode="eval").body)
