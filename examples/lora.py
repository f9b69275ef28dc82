"""Low-rank adapters (LoRA, with PEFT): a frozen language model, and adapters that know how little they were taught.

A tiny GPT-2 has learned one task, and is adapted to another from few examples and from many. Only the adapters require
gradients, so only they are uncertain: nothing has to be named.

    python examples/lora.py [--quick]
"""

from __future__ import annotations

import argparse
import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2ForSequenceClassification

from laplace import Laplace
from laplace.evaluation import accuracy, nll

WORDS, LENGTH, PAD = 20, 6, 0


def sentences(n: int, topic: int) -> list[dict[str, Tensor]]:
    """Random words. The label says whether more than half of them lie in the ten words that make up the topic."""
    ids = torch.randint(1, WORDS, (n, LENGTH))
    inside = ((ids >= topic) & (ids < topic + 10)).sum(1) + 0.5 * torch.randn(n)
    labels = (inside > LENGTH / 2).long()
    return [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": y} for i, y in zip(ids, labels, strict=True)
    ]


def train(model: nn.Module, data: list[dict[str, Tensor]], epochs: int, lr: float) -> None:
    """Train the parameters that require gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=32, shuffle=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    model.eval()


def main(quick: bool = False) -> dict[int, dict[str, float]]:
    """For each number of examples: what is uncertain, how good it is, and how sure."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, num_labels=2,
        pad_token_id=PAD, bos_token_id=PAD, eos_token_id=PAD,
    )  # fmt: skip
    base = GPT2ForSequenceClassification(config)
    train(base, sentences(300 if quick else 800, topic=1), epochs=5 if quick else 10, lr=3e-3)

    test = sentences(200, topic=6)
    labels = torch.stack([sentence["labels"] for sentence in test])
    new = DataLoader(test, batch_size=100)  # type: ignore[arg-type]
    adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    rows: dict[int, dict[str, float]] = {}
    for n in (20, 200) if quick else (20, 100, 500):
        model = get_peft_model(copy.deepcopy(base), adapters)  # freezes all but the adapters
        data = sentences(n, topic=6)
        train(model, data, epochs=800 // n if quick else 4000 // n, lr=1e-2)

        la = Laplace(model, "classification", subset_of_weights="all")
        la.fit(DataLoader(data, batch_size=50))  # type: ignore[arg-type]
        la.tune()
        prediction = la.predict(new, link_approx="mc", n_samples=500, progress_bar=False)
        with torch.no_grad():
            network = torch.cat([model(**batch).logits.softmax(1) for batch in new])
        rows[n] = {
            "weights": sum(p.numel() for p in model.parameters()),
            "uncertain": la.n_params,
            "only_adapters": float(all("lora_" in row.name for row in la.coverage())),
            "accuracy": accuracy(prediction.mean, labels),
            "nll_before": nll(network, labels),
            "nll": nll(prediction.mean, labels),
            "epistemic": float(prediction.epistemic.mean()),
        }

    first = next(iter(rows.values()))
    print(f"{first['weights']:,.0f} weights, of which {first['uncertain']:,.0f} in the adapters are uncertain.\n")
    print(f"{'adapted on':>14} {'accuracy':>8} {'NLL network':>12} {'NLL Laplace':>12} {'epistemic':>10}")
    for n, row in rows.items():
        print(
            f"{n:5} examples {row['accuracy']:8.1%} {row['nll_before']:12.3f}"
            f" {row['nll']:12.3f} {row['epistemic']:10.4f}"
        )
    print("\nEpistemic uncertainty (nats) is what more examples would take away: it falls as they come.")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer examples, less training")
    main(parser.parse_args().quick)
