"""Whether ours and laplace-torch give the same numbers where their definitions agree: small networks, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

import networks
from data import Batches, in_batches, inputs_of
from laplace import Laplace
from peer import Answer, Peer, Question

EXAMPLES, INPUTS, OUTPUTS, PREDICTIONS = 60, 6, 3, 8
PRIOR_PRECISION = 2.0
SETTINGS: Final = {  # likelihood -> weights and structure
    "classification": ["all full", "all kron", "all diag", "last_layer full", "last_layer kron"],
    "regression": ["all full", "all kron"],
}


@dataclass(frozen=True)
class Agreement:
    """How far the two are apart in one setting; or why that is not known."""

    setting: str
    evidence: float | None = None  # relative difference of the log evidence
    predictions: float | None = None  # largest difference: probabilities, or means and covariances of f
    remark: str = ""

    def __str__(self) -> str:
        if self.evidence is None or self.predictions is None:
            return f"{self.setting:<36}{self.remark}"
        return f"{self.setting:<36}log evidence {self.evidence:.0e}, predictions {self.predictions:.0e}"


def compare(peer: Peer) -> list[Agreement]:
    """All settings on one small network with one set of weights."""
    return [agreement for likelihood in SETTINGS for agreement in _compare(peer, likelihood)]


def _compare(peer: Peer, likelihood: str) -> list[Agreement]:
    torch.manual_seed(0)
    model, batches = networks.tiny_mlp().double(), _batches(likelihood)
    same = {"task": "numbers", "likelihood": likelihood, "n": PREDICTIONS, "prior_precision": PRIOR_PRECISION}
    settings = [setting.split() for setting in SETTINGS[likelihood]]
    requests = [{**same, "weights": weights, "structure": structure} for weights, structure in settings]
    answers = peer.ask_all(Question("tiny_mlp", model.state_dict(), batches), requests)
    found = []
    for (weights, structure), answer in zip(settings, answers, strict=True):
        la = Laplace(model, likelihood, weights, structure, prior_precision=PRIOR_PRECISION).fit(batches)
        found.append(_difference(f"{likelihood}, {weights}, {structure}", la, inputs_of(batches, PREDICTIONS), answer))
    return found


def _difference(setting: str, la: Laplace, x: Tensor, answer: Answer) -> Agreement:
    if answer.failure:
        return Agreement(setting, remark=f"{answer.failure} {answer.remark}".strip())
    out = la(x)
    ours = torch.cat([part.flatten() for part in (out if isinstance(out, tuple) else [out])])
    theirs = torch.tensor(answer.found["predictions"], dtype=torch.float64)
    evidence, expected = float(la.log_marginal_likelihood()), answer.found["evidence"]
    return Agreement(setting, abs(evidence / expected - 1), float((ours - theirs).abs().max()))


def _batches(likelihood: str) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    y: Tensor = torch.randn(EXAMPLES, OUTPUTS, generator=generator, dtype=torch.float64)
    return in_batches(x, y if likelihood == "regression" else y.argmax(1), EXAMPLES // 3)
