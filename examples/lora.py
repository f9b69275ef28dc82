"""Low-rank adapters (LoRA, with PEFT): a frozen language model, and adapters that know how little they were taught.

A tiny GPT-2 has learned one task, and is adapted to another from few examples and from many. Only the adapters require
gradients, so only they are uncertain: nothing has to be named.

    python examples/lora.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2ForSequenceClassification

from laplace import Laplace
from laplace.evaluation import accuracy, nll

WORDS, LENGTH, PAD = 20, 7, 0


def sentences(n: int, topic: int) -> list[dict[str, Tensor]]:
    """Random words. The label says whether more than half of them lie in the ten words that make up the topic."""
    ids = torch.randint(1, WORDS, (n, LENGTH))
    inside = ((ids >= topic) & (ids < topic + 10)).sum(1) + 0.5 * torch.randn(n)
    labels = (inside > LENGTH / 2).long()
    mask = torch.ones(LENGTH, dtype=torch.long)
    return [{"input_ids": i, "attention_mask": mask, "labels": y} for i, y in zip(ids, labels, strict=True)]


def train(model: nn.Module, data: list[dict[str, Tensor]], steps: int, lr: float) -> None:
    """Train the parameters that require gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    batches = DataLoader(data, batch_size=32, shuffle=True)
    model.train()
    for _ in range(math.ceil(steps / len(batches))):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    model.eval()


def probabilities(model: nn.Module, data: list[dict[str, Tensor]]) -> Tensor:  # (N, 2)
    """Those of the network itself."""
    with torch.no_grad():
        return torch.cat([model(**batch).logits.softmax(1) for batch in DataLoader(data, batch_size=100)])


def labels_of(data: list[dict[str, Tensor]]) -> Tensor:  # (N,)
    """One for each sentence."""
    return torch.stack([sentence["labels"] for sentence in data])


def main(quick: bool = False) -> dict[int, dict[str, float]]:
    """For each number of examples, 0 included: what is uncertain, how good it is, and how sure."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, num_labels=2,
        pad_token_id=PAD, bos_token_id=PAD, eos_token_id=PAD,
        initializer_range=0.2,  # the usual 0.02 is for hundreds of dimensions
    )  # fmt: skip
    base = GPT2ForSequenceClassification(config)
    print("A language model is adapted to a new task: how sure may it be after so many examples?")
    train(base, sentences(1500, topic=1), steps=200 if quick else 500, lr=3e-3)
    first, test = sentences(500, topic=1), sentences(500, topic=6)
    own = accuracy(probabilities(base, first), labels_of(first))
    before = accuracy(probabilities(base, test), labels_of(test))
    print(f"Before: {own:.1%} right in its own task, {before:.1%} in the new one.\n")

    rows: dict[int, dict[str, float]] = {0: {"own": own, "accuracy": before}}
    print(f"{'adapted on':>14} {'accuracy':>8} {'NLL network':>12} {'NLL Laplace':>12} {'epistemic':>10}")
    for n, steps in {20: 40, 300: 100}.items() if quick else {20: 60, 100: 200, 1000: 400}.items():
        adapters = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        model = get_peft_model(copy.deepcopy(base), adapters)  # freezes all but the adapters
        data = sentences(n, topic=6)
        train(model, data, steps, lr=1e-2)

        la = Laplace(model, "classification", subset_of_weights="all")
        la.fit(DataLoader(data, batch_size=50))
        la.tune(method="evidence")
        new = DataLoader(test, batch_size=100)
        prediction = la.predict(new, link_approx="mc", n_samples=500, progress_bar=False)

        labels = labels_of(test)
        rows[n] = row = {
            "weights": sum(p.numel() for p in model.parameters()),
            "uncertain": la.n_params,
            "only_adapters": float(all("lora_" in part.name for part in la.coverage())),
            "accuracy": accuracy(prediction.mean, labels),
            "nll_before": nll(probabilities(model, test), labels),
            "nll": nll(prediction.mean, labels),
            "epistemic": float(prediction.epistemic.mean()),
        }
        print(
            f"{n:5} examples {row['accuracy']:8.1%} {row['nll_before']:12.3f} {row['nll']:12.3f}"
            f" {row['epistemic']:10.4f}"
        )

    few, many = rows[min(rows.keys() - {0})], rows[max(rows)]
    print(f"\nOf {few['weights']:,} weights, the {few['uncertain']:,} of the adapters are uncertain.")
    print(
        f"Epistemic uncertainty, what more examples would take away, went from {few['epistemic']:.2f} to"
        f" {many['epistemic']:.2f} nats (of at most 0.69)."
    )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer examples, less training")
    main(parser.parse_args().quick)
