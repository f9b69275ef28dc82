"""A transformer of Hugging Face: does it notice sentences with words that it has never read?

A tiny DistilBERT learns whether a sentence has more good or more bad words. Half of the neutral words never occur in
training; sentences with those are where it should be less sure. Batches are the mappings that a tokenizer gives.

    python examples/transformer.py [--quick]
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from laplace import Laplace
from laplace.evaluation import accuracy, auroc, confidence, nll

PAD, GOOD, BAD, KNOWN, UNKNOWN = 0, (1, 5), (5, 9), (9, 24), (24, 40)  # ids of words, from and up to
LENGTH = 10


def sentences(n: int, neutral: tuple[int, int]) -> list[dict[str, Tensor]]:
    """Good, bad and neutral words, padded to the same length; the label says which of the first two are more."""
    made = []
    for _ in range(n):
        length = int(torch.randint(5, LENGTH + 1, ()))
        kinds = torch.randint(4, (length,))  # half of the words are neutral
        words = torch.stack([torch.randint(*ids, (length,)) for ids in (GOOD, BAD, neutral, neutral)])
        ids = words.gather(0, kinds.unsqueeze(0)).squeeze(0)
        surplus = (kinds == 0).sum() - (kinds == 1).sum() + 0.5 * torch.randn(())  # opinions differ
        made.append(
            {
                "input_ids": nn.functional.pad(ids, (0, LENGTH - length), value=PAD),
                "attention_mask": (torch.arange(LENGTH) < length).long(),
                "labels": (surplus > 0).long(),
            }
        )
    return made


def train(model: nn.Module, data: list[dict[str, Tensor]], epochs: int) -> None:
    """As the models of transformers are trained: given labels, they return their loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    model.eval()


def main(quick: bool = False) -> dict[str, dict[str, dict[str, float]]]:
    """Scores with some of the weights uncertain, on words that were seen and on others; how well others are noticed."""
    torch.manual_seed(0)
    data = sentences(200 if quick else 400, KNOWN)
    config = DistilBertConfig(
        vocab_size=UNKNOWN[1],
        max_position_embeddings=LENGTH,
        dim=16,
        hidden_dim=32,
        n_layers=2,
        n_heads=2,
        num_labels=2,
        initializer_range=0.1,  # the usual 0.02 is for hundreds of dimensions
    )
    model = DistilBertForSequenceClassification(config)
    print(f"Does a transformer, trained on {len(data)} sentences, notice words that it has never read?\n")
    train(model, data, epochs=8 if quick else 12)

    # A list of mappings is a dataset: the DataLoader makes mappings of tensors of it, which go to the network by name.
    loader = DataLoader(data, batch_size=50)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "kron keeps")  # of what has no Kronecker form: see la.coverage()
        posteriors = {
            "last layer": Laplace(model, "classification").fit(loader),
            "embeddings": Laplace(model, "classification", ["distilbert.embeddings.word_embeddings"]).fit(loader),
            "all weights": Laplace(model, "classification", "all").fit(loader),
        }
    for la in posteriors.values():
        la.tune(method="evidence")

    rows: dict[str, dict[str, dict[str, float]]] = {}
    doubts: dict[str, dict[str, Tensor]] = {name: {} for name in posteriors}
    print(f"{'neutral words':13} {'uncertain':11} {'accuracy':>8} {'confidence':>10} {'NLL':>6} {'epistemic':>10}")
    for words, neutral in {"seen": KNOWN, "never seen": UNKNOWN}.items():
        test = sentences(200 if quick else 500, neutral)
        labels = torch.stack([sentence["labels"] for sentence in test])
        new = DataLoader(test, batch_size=100)
        with torch.no_grad():
            logits = [model(batch["input_ids"], batch["attention_mask"]).logits for batch in new]
        probabilities = {"nothing": torch.cat(logits).softmax(1)}
        for name, la in posteriors.items():
            prediction = la.predict(new, link_approx="mc", n_samples=500, progress_bar=False)
            probabilities[name], doubts[name][words] = prediction.mean, prediction.epistemic
        rows[words] = {}
        for name, p in probabilities.items():
            row = {"accuracy": accuracy(p, labels), "confidence": confidence(p), "nll": nll(p, labels)}
            row["epistemic"] = float(doubts[name][words].mean()) if name in doubts else 0.0
            rows[words][name] = row
            print(
                f"{words:13} {name:11} {row['accuracy']:8.1%} {row['confidence']:10.1%} {row['nll']:6.3f}"
                f" {row['epistemic']:10.4f}"
            )

    print("\nEpistemic uncertainty, in nats, is what more sentences would take away. How well it tells sentences with")
    print("words never seen from the others (AUROC; 0.5 is guessing):")
    noticed = {name: auroc(doubt["seen"], doubt["never seen"]) for name, doubt in doubts.items()}
    for name, la in posteriors.items():
        print(f"  {name:11} ({la.n_params:5,} weights) {noticed[name]:.3f}")
    return rows | {"noticed": {name: {"auroc": value} for name, value in noticed.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sentences, less training")
    main(parser.parse_args().quick)
