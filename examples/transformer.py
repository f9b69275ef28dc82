"""A transformer of Hugging Face: which sentences does it have reason to be sure of?

A tiny DistilBERT learns whether a sentence has more good or more bad words. Half of the neutral words never occur in
training; sentences made of those are where it should be less sure. Batches are the mappings that a tokenizer gives.

    python examples/transformer.py [--quick]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from laplace import Laplace
from laplace.evaluation import accuracy, nll

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
        padding = LENGTH - length
        made.append(
            {
                "input_ids": nn.functional.pad(ids, (0, padding), value=PAD),
                "attention_mask": (torch.arange(LENGTH) < length).long(),
                "labels": (surplus > 0).long(),
            }
        )
    return made


def train(model: nn.Module, data: list[dict[str, Tensor]], epochs: int) -> None:
    """As the models of transformers are trained: given labels, they return their loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=32, shuffle=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    model.eval()


def main(quick: bool = False) -> dict[str, dict[str, float]]:
    """Evidence before and after tuning, and scores and uncertainty on words that were seen and on others."""
    torch.manual_seed(0)
    data = sentences(150 if quick else 400, KNOWN)
    config = DistilBertConfig(
        vocab_size=UNKNOWN[1],
        max_position_embeddings=LENGTH,
        dim=16,
        hidden_dim=32,
        n_layers=2,
        n_heads=2,
        num_labels=2,
    )
    model = DistilBertForSequenceClassification(config)
    train(model, data, epochs=5 if quick else 12)

    # A list of mappings is a dataset: the DataLoader makes mappings of tensors of it, which go to the network by name.
    loader = DataLoader(data, batch_size=50)  # type: ignore[arg-type]
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
    la.fit(loader)
    before = float(la.log_marginal_likelihood())
    la.tune()
    after = float(la.log_marginal_likelihood())
    evidence = {"before": before, "after": after, "prior_precision": float(la.prior_precision)}

    rows = {}
    for name, neutral in {"words seen": KNOWN, "words never seen": UNKNOWN}.items():
        test = sentences(100 if quick else 200, neutral)
        new = DataLoader(test, batch_size=100)  # type: ignore[arg-type]
        labels = torch.stack([sentence["labels"] for sentence in test])
        prediction = la.predict(new, link_approx="mc", n_samples=500, progress_bar=False)
        with torch.no_grad():
            network = torch.cat([model(b["input_ids"], b["attention_mask"]).logits.softmax(1) for b in new])
        rows[name] = {
            "accuracy": accuracy(prediction.mean, labels),
            "nll_before": nll(network, labels),
            "nll": nll(prediction.mean, labels),
            "epistemic": float(prediction.epistemic.mean()),
            "aleatoric": float(prediction.aleatoric.mean()),
        }

    print(f"{len(data)} sentences, {la.n_params:,} uncertain weights.")
    print(
        f"Log evidence {before:.1f} with prior precision 1,"
        f" {after:.1f} with the best, {evidence['prior_precision']:.3g}.\n"
    )
    print(
        f"{'new sentences':18} {'accuracy':>8} {'NLL network':>12}"
        f" {'NLL Laplace':>12} {'epistemic':>10} {'aleatoric':>10}"
    )
    for name, row in rows.items():
        print(
            f"{name:18} {row['accuracy']:8.1%} {row['nll_before']:12.3f} {row['nll']:12.3f} "
            f"{row['epistemic']:10.4f} {row['aleatoric']:10.4f}"
        )
    print("\nEpistemic: what more sentences would teach; aleatoric: what they would not. Both in nats (at most 0.693).")
    return {"evidence": evidence, **rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sentences, less training")
    main(parser.parse_args().quick)
