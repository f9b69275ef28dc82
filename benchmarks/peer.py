"""laplace-torch beside ours: in its own process and from its own folder, since both are imported as `laplace`.

The network, its weights and the data go over as a file; seconds and numbers come back as JSON. Every question has a
time and a memory limit, and where there is no answer, the reason is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from data import Batches
from measure import run_apart

VERSION = "0.3"
FOLDER = Path(__file__).parent / ".peer"
PACKAGES = (
    f"laplace-torch=={VERSION}",
    "curvlinops-for-pytorch",
    "backpack-for-pytorch",
    "torchmetrics",
    "lightning-utilities",
    "opt-einsum",
    "asdfghjkl==0.1a4",
    "einops",
    "einconv",
    "unfoldNd",
    "linear_operator",
    "jaxtyping",
    "wadler-lindig",
    "scipy",
    "tqdm",
)
INSTALL_SECONDS = 600


@dataclass(frozen=True)
class Question:
    """A network by its name in `networks`, its weights, and data."""

    network: str
    weights: dict[str, torch.Tensor]
    batches: Batches

    def save(self, path: Path) -> None:
        """Write tensors and names, no code."""
        x, y = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        size = len(self.batches[0][0])
        torch.save({"network": self.network, "weights": self.weights, "x": x, "y": y, "size": size}, path)


@dataclass(frozen=True)
class Answer:
    """What was found; or in `failure` a word for the table, and in `remark` what laplace-torch said."""

    found: dict[str, Any] = field(default_factory=dict)
    peak: int = 0  # bytes
    failure: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Peer:
    """laplace-torch in a folder; `missing` says why it cannot be asked."""

    folder: Path
    missing: str = ""
    seconds: int = 60
    memory: int = 8 * 10**9

    def ask(self, question: Question, task: str, **request: Any) -> Answer:
        """Have a task of peer_side.py done."""
        (answer,) = self.ask_all(question, [{"task": task, **request}])
        return answer

    def ask_all(self, question: Question, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Have several tasks done by one process."""
        if self.missing:
            return [Answer(failure=self.missing)] * len(requests)
        with tempfile.TemporaryDirectory() as name:
            exchange = Path(name)
            question.save(exchange / "problem.pt")
            (exchange / "requests.json").write_text(json.dumps(requests))
            command = [sys.executable, str(Path(__file__).with_name("peer_side.py")), str(self.folder), name]
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            try:
                done = run_apart(command, self.seconds, self.memory, environment)
            except subprocess.TimeoutExpired:
                return [Answer(failure=f"not in {self.seconds} s")] * len(requests)
            path = exchange / "answers.json"
            if not path.exists():
                said = done.errors.strip().splitlines() or ["no message"]
                return [Answer(peak=done.peak, failure="crashed", remark=said[-1])] * len(requests)
            return [self._read(answer, done.peak) for answer in json.loads(path.read_text())]

    def _read(self, answer: dict[str, Any], peak: int) -> Answer:
        if "found" in answer:
            return Answer(answer["found"], peak)
        out_of_memory = "allocate memory" in answer["error"] or answer["error"].startswith("MemoryError")
        if out_of_memory:
            return Answer(peak=peak, failure=f"not in {self.memory / 1e9:g} GB")
        return Answer(peak=peak, failure="refused", remark=answer["error"])


def install(folder: Path = FOLDER) -> Peer:
    """laplace-torch in `folder`, installed there on first use; torch comes from the running environment."""
    stamp, packages = folder / "installed.txt", "\n".join(PACKAGES)
    if stamp.exists() and stamp.read_text() == packages:
        return Peer(folder)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--no-deps", "--target", str(folder)]
    try:
        subprocess.run([*pip, *PACKAGES], check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        print(f"laplace-torch {VERSION} is left out: it cannot be installed here ({said[-1]}).\n")
        return Peer(folder, missing="not installed")
    stamp.write_text(packages)
    return Peer(folder)
