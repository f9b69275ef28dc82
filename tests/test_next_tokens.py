"""Causal language models shift labels inside their loss: that loss is fitted, and logits stay where they are."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from exact import assert_close
from laplace import Laplace, marglik_training
from laplace.errors import InputError, LaplaceWarning

V, T, N = 7, 5, 6
pytestmark = pytest.mark.filterwarnings("error::laplace.errors.LaplaceWarning")


class Causal(nn.Module):
    """A language model as transformers has them; `terms` is what its loss has besides."""

    def __init__(self, terms: str = "", returns: str = "loss", later: bool = True) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(V, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, V)
        self.terms, self.returns, self.later = terms, returns, later

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        f, loss = self.head(self.mix(self.embed(input_ids))[0]), None
        if labels is not None and self.returns == "loss":
            rows, y = (f[:, :-1], labels[:, 1:]) if self.later else (f, labels)
            smoothing = 0.1 if self.terms == "smoothing" else 0.0
            reduction = "sum" if self.terms == "sum" else "mean"
            loss = cross_entropy(rows.flatten(0, 1), y.flatten(), label_smoothing=smoothing, reduction=reduction)
            loss = loss + (0.37 + 0.01 * f.square().mean() if self.terms == "auxiliary" else 0)
        return SimpleNamespace(logits=f, loss=loss)


def made(terms: str = "", returns: str = "loss", later: bool = True) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Causal(terms, returns, later).double()
    ids = torch.randint(1, V, (N, T))
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for i in range(N):  # padding behind, prompts before
        mask[i, T - i % 3 :] = 0
        labels[i, T - i % 3 :] = -100
    labels[0, :2] = labels[3, :1] = -100
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def parts(batch: dict[str, Tensor], size: int = 4) -> list[dict[str, Tensor]]:
    return [{key: value[i : i + size] for key, value in batch.items()} for i in range(0, N, size)]


def by_hand(batch: dict[str, Tensor]) -> Tensor:
    """The labels of the logits."""
    y = batch["labels"].roll(-1, 1)
    y[:, -1] = -100
    return y


def nll(model: nn.Module, batch: dict[str, Tensor], y: Tensor) -> float:
    with torch.no_grad():
        f = model(batch["input_ids"], batch.get("attention_mask")).logits
    return float(cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum"))


@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_what_is_fitted_is_the_networks_own_loss(subset, curvature):
    model, batch = made()
    la = Laplace(model, "classification", subset, "full", curvature=curvature).fit(parts(batch))
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    assert la.loss == pytest.approx(float(model(**batch).loss.detach()) * tokens)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    other = Laplace(model, "classification", subset, "full", curvature=curvature).fit([(inputs, by_hand(batch))])
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    assert_close(la(batch), other(inputs))
    assert la(batch).shape == (N, T, V)  # at the logits
    assert la.n_data == N


def test_the_empirical_fisher_is_that_of_the_networks_own_scores():
    model, batch = made()
    la = Laplace(model, "classification", "all", "full", curvature="ef").fit(parts(batch))
    total = torch.zeros_like(la.H)
    for i in range(N):
        one = {key: value[i : i + 1] for key, value in batch.items()}
        loss = model(**one).loss * (one["labels"][:, 1:] != -100).sum()
        score = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        total += torch.outer(score, score)
    assert_close(la.H, total)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_gpt2_of_transformers(subset):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model, batch = transformers.GPT2LMHeadModel(config).eval(), made()[1]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    la = Laplace(model, "classification", subset, "diag").fit(parts(transformers.BatchEncoding(batch)))
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    assert la.loss == pytest.approx(float(model(**batch).loss.detach()) * tokens, rel=1e-5)
    assert la(batch).shape == (N, T, V)


@pytest.mark.parametrize("kind", ["DistilBertForTokenClassification", "DistilBertForMaskedLM"])
def test_models_that_do_not_shift_are_fitted_as_they_are(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=V, max_position_embeddings=T, n_layers=1, n_heads=2, dim=4, hidden_dim=6, num_labels=V
    )
    model, batch = getattr(transformers, kind)(config).eval(), made()[1]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    la = Laplace(model, "classification", "all", "diag").fit(parts(batch))
    tokens = int((batch["labels"] != -100).sum())
    assert la.loss == pytest.approx(float(model(**batch).loss.detach()) * tokens, rel=1e-5)


@pytest.mark.parametrize("later", [True, False])
def test_a_sum_is_as_good_as_a_mean(later):
    model, batch = made("sum", later=later)
    la = Laplace(model, "classification", hessian_structure="diag").fit(parts(batch))
    assert la.loss == pytest.approx(float(model(**batch).loss.detach()))


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("terms", ["smoothing", "auxiliary"])
def test_a_loss_with_other_terms_is_warned_of_once_and_still_says_whether_it_shifts(terms, later):
    model, batch = made(terms, later=later)
    la = Laplace(model, "classification", hessian_structure="diag")
    with pytest.warns(LaplaceWarning, match=r"own loss is \d\.\d+, .* is \d\.\d+") as said:
        la.fit(parts(batch)).fit(parts(batch))
    assert len(said) == 1
    assert la.loss == pytest.approx(nll(model, batch, by_hand(batch) if later else batch["labels"]))


def test_networks_without_a_loss_and_pairs_are_taken_as_they_are():
    model, batch = made(returns="nothing")
    la = Laplace(model, "classification", hessian_structure="diag").fit(parts(batch))
    assert la.loss == pytest.approx(nll(model, batch, batch["labels"]))
    model, batch = made()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    labels = torch.where(batch["labels"] < 0, -100, (batch["labels"] + 1) % V)  # tags of the tokens, say
    la = Laplace(model, "classification", hessian_structure="diag").fit([(inputs, labels)])
    assert la.loss == pytest.approx(nll(model, batch, labels))


def test_networks_that_take_no_labels_are_taken_as_they_are():
    class Tagger(nn.Module):
        def __init__(self, net: Causal) -> None:
            super().__init__()
            self.net = net

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.net(input_ids).logits

    model, batch = made()
    batch.pop("attention_mask")
    la = Laplace(Tagger(model), "classification", hessian_structure="diag").fit(parts(batch))
    assert la.loss == pytest.approx(nll(model, batch, batch["labels"]))


def test_a_pair_of_tokens_with_themselves_is_refused():
    model, batch = made()
    ids = batch["input_ids"]
    with pytest.raises(InputError, match=r"batch 0: the labels are the inputs themselves.*x\[:, :-1\], x\[:, 1:\]"):
        Laplace(model, "classification").fit([(ids, ids)])
    with pytest.raises(InputError, match="batch 0: the labels are the inputs themselves"):
        Laplace(model, "classification").fit([({"input_ids": ids}, ids)])
    la = Laplace(model, "classification", hessian_structure="diag").fit([(ids[:, :-1], ids[:, 1:])])
    whole = Laplace(model, "classification", hessian_structure="diag").fit([{"input_ids": ids, "labels": ids}])
    assert la.loss == pytest.approx(whole.loss)


@pytest.mark.parametrize("kind", ["pair", "mapping", "pair of a mapping"])
def test_tokens_as_their_own_labels_are_refused_if_a_network_without_a_loss_predicts_the_next(kind):
    class Wrapped(nn.Module):
        """A language model as laplace-torch's users wrap it: logits alone. After each token comes the next number."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(V, V), nn.Linear(V, V, bias=False)
            with torch.no_grad():
                self.embed.weight.copy_(torch.eye(V))
                self.head.weight.copy_(4 * torch.eye(V).roll(1, 0))

        def forward(self, input_ids: Any) -> Tensor:
            ids = input_ids["input_ids"] if isinstance(input_ids, dict) else input_ids
            return self.head(self.embed(ids))

    torch.manual_seed(0)
    ids = (torch.arange(T) + torch.randint(V, (N, 1))) % V
    mapping = {"input_ids": ids}
    batch = {"pair": (ids, ids), "mapping": mapping | {"labels": ids}, "pair of a mapping": (mapping, ids)}[kind]
    with pytest.raises(InputError, match=r"batch 0: the labels are the inputs .* next token better .* x\[:, 1:\]"):
        Laplace(Wrapped(), "classification").fit([batch])
    ready = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    Laplace(Wrapped(), "classification").fit([mapping | {"labels": ready}])
    tagger = Wrapped()
    tagger.head.weight = nn.Parameter(4 * torch.eye(V))  # repeats its tokens: what the labels say
    Laplace(tagger, "classification").fit([batch])


@pytest.mark.parametrize("seed", range(8))
def test_a_network_that_was_not_trained_is_given_its_tokens_as_labels(seed):
    torch.manual_seed(seed)
    v = 10
    model = nn.Sequential(nn.Embedding(v, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, v))
    ids = torch.randint(v, (64, 20))
    assert Laplace(model, "classification", hessian_structure="diag").fit([(ids, ids)]).is_fitted


def test_labels_that_are_the_next_tokens_already_are_not_shifted_again():
    model, batch = made()
    ready = batch | {"labels": by_hand(batch | {"labels": batch["input_ids"]})}
    la = Laplace(model, "classification", hessian_structure="diag")
    with pytest.warns(LaplaceWarning, match="next tokens already"):
        la.fit(parts(ready))
    assert la.loss == pytest.approx(nll(model, batch, ready["labels"]))


def test_logits_that_are_all_alike_do_not_hide_the_shift():
    model, batch = made()
    nn.init.zeros_(model.head.weight)
    la = Laplace(model, "classification", hessian_structure="diag").fit(parts(batch))
    assert la.loss == pytest.approx(nll(model, batch, by_hand(batch)))


def test_weights_and_masks_go_with_their_labels():
    model, batch = made()
    batch["labels"] = batch["input_ids"]
    weights = torch.rand(N, T, dtype=torch.float64) + 0.1
    la = Laplace(model, "classification", hessian_structure="full").fit(parts(batch | {"weights": weights}))
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    other = Laplace(model, "classification", hessian_structure="full")
    other.fit([(inputs, by_hand(batch), weights.roll(-1, 1))])
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    one = Laplace(model, "classification", hessian_structure="full").fit(parts(batch | {"weights": weights[:, 0]}))
    other.fit([(inputs, by_hand(batch), weights[:, 0])])
    assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood())


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
def test_validation_and_online_training_shift_as_fit_does(tmp_path):
    model, batch = made()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    la = Laplace(model, "classification", hessian_structure="kron").fit(parts(batch))
    search = {"method": "validation", "grid_size": 3, "link_approx": "probit"}
    a = la.tune(val_loader=parts(batch), **search)
    b = la.tune(val_loader=[(inputs, by_hand(batch))], **search)
    assert a.score == pytest.approx(b.score, rel=1e-9)
    la.save(tmp_path / "la.safetensors")
    loaded = Laplace.load(tmp_path / "la.safetensors", model)  # which has read no batch yet
    assert loaded.tune(val_loader=parts(batch), **search).score == pytest.approx(a.score)
    losses = []
    for loader in (parts(batch), [(inputs, by_hand(batch))]):
        options = {"n_epochs": 1, "subset_of_weights": "last_layer", "optimizer_cls": torch.optim.SGD}
        losses.append(
            marglik_training(made()[0], loader, optimizer_kwargs={"lr": 1e-9}, **options)[3][0]  # type: ignore[arg-type]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_first_batch_of_padding_decides_nothing():
    model, batch = made()
    padding = {"input_ids": batch["input_ids"][:2], "labels": torch.full((2, T), -100)}
    la = Laplace(model, "classification", hessian_structure="diag").fit([padding, *parts(batch)])
    assert la.loss == pytest.approx(nll(model, batch, by_hand(batch)))


def test_sequences_with_one_label_are_not_asked():
    """A reward or a class of a whole sequence has no next position."""
    model, batch = made()

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = model, nn.Linear(V, 3).double()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            assert labels is None
            return self.head(self.net(input_ids).logits.mean(1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la = Laplace(Pooled(), "classification").fit([{"input_ids": batch["input_ids"], "labels": torch.arange(N) % 3}])
    assert la({"input_ids": batch["input_ids"]}).shape == (N, 3)
