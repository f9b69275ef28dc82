"""Trainers, pipelines, folders, adapters and answer tokens of Hugging Face, with tiny networks made from configs."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import laplace
from laplace import Categorical, Laplace
from laplace.errors import (
    ArgumentError,
    CheckpointError,
    InputError,
    LaplaceWarning,
    ModelError,
    NotFittedError,
    OptionError,
)

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from laplace.integrations import huggingface as hf  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning"),
    pytest.mark.filterwarnings("ignore:.*validation examples are few:laplace.errors.LaplaceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "plot", "the", "a"]
N, T, C = 14, 5, 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")  # noqa: S106
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")  # noqa: S106


def assert_close(a: Tensor, b: Tensor, rtol: float) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.detach().abs().max()))


def moved(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def classifier(seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    options = {"n_layers": 1, "n_heads": 2, "dim": 8, "hidden_dim": 8, "num_labels": C} | config
    return moved(
        transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(vocab_size=len(WORDS), max_position_embeddings=8, **options)
        )
    )


def decoder(kind: str = "GPT2LMHeadModel", **config: Any) -> Any:
    torch.manual_seed(0)
    options = {
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    made = transformers.GPT2Config(vocab_size=len(WORDS), **options | ids | config)
    return moved(getattr(transformers, kind)(made))


def examples(n: int = N, seed: int = 1) -> list[dict[str, Any]]:
    """Sentences of different lengths, as tokenizers give them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(n):
        ids = torch.randint(2, len(WORDS), (1 + i % T,), generator=generator).tolist()
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": i % C})
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The right-padded batch of some sentences."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0}
    batch = {key: torch.tensor([row[key] + [0] * (longest - len(row[key])) for row in rows]) for key in fill}
    return batch | {"labels": torch.tensor([row["labels"] for row in rows])}


class Sentences(torch.utils.data.Dataset):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i] | {"text": "a column that the network does not take"}


def trainer_of(model: Any, tmp_path: Path, callbacks: Any = None, **arguments: Any) -> Any:
    given = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"} | arguments
    args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, **given)
    return transformers.Trainer(
        model, args, train_dataset=Sentences(examples()), eval_dataset=Sentences(examples(30, seed=2)),
        data_collator=padded, callbacks=callbacks,
    )  # fmt: skip


# ---- data ---------------------------------------------------------------------------------------------------------


def test_a_trainer_is_fitted_in_order_with_its_collator_and_without_drawing(tmp_path):
    model = classifier()
    trainer = trainer_of(model, tmp_path, dataloader_drop_last=True)
    state, mode = torch.get_rng_state(), model.training
    la = Laplace(model, "classification").fit(trainer)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training == mode
    assert la.n_data == laplace.plan(model, trainer, "classification").n_data == N
    same = Laplace(model, "classification").fit([padded(examples()[:9]), padded(examples()[9:])])
    assert_close(la.log_marginal_likelihood(), same.log_marginal_likelihood(), rtol=1e-5)
    assert la.tune().score == pytest.approx(same.tune().score, rel=1e-4)  # which reads the data again


def test_held_out_data_of_a_trainer_is_its_evaluation_data(tmp_path):
    trainer = trainer_of(classifier(), tmp_path)
    la = Laplace(trainer.model, "classification").fit(trainer)
    held_out = DataLoader(Sentences(examples(30, seed=2)), batch_size=8, collate_fn=padded)
    assert_close(la.conformal(trainer).threshold(), la.conformal(held_out).threshold(), rtol=1e-5)
    nll = [laplace.report(la, data, out=None, n_bootstrap=20).score("Laplace", "nll") for data in (trainer, held_out)]
    assert nll[0] == pytest.approx(nll[1], rel=1e-5)
    found = la.calibrate(trainer)
    same = Laplace(trainer.model, "classification").fit(trainer).calibrate(held_out)
    assert found.n_data == same.n_data == 30
    assert found.chosen.nll == pytest.approx(same.chosen.nll, rel=1e-5)
    for missing in (None, {"a": examples(), "b": examples()}):
        trainer.eval_dataset = missing
        for call in (la.calibrate, la.conformal, lambda data: laplace.report(la, data)):
            with pytest.raises(InputError, match=r"training data is not taken.*get_eval_dataloader\(dataset\)"):
                call(trainer)


def test_examples_that_are_no_batch_say_how_they_are_joined():
    rows = examples()
    la = Laplace(classifier(), "classification").fit(rows, collate_fn=padded)
    ids = torch.tensor(rows[1]["input_ids"])
    for single in (ids, {"input_ids": ids}, rows[1]):
        with pytest.raises(InputError, match="a single example, but a batch is needed"):
            la.predict(single)
    with pytest.raises(InputError, match=r"DataLoader\(examples, batch_size=32, collate_fn=\.\.\.\)"):
        la.predict(rows[1:2], collate_fn=padded)
    with pytest.raises(ArgumentError, match=r"no option 'collate_fn'\. Write DataLoader\(dataset"):
        la.calibrate(rows, collate_fn=padded)
    with pytest.raises(InputError, match=r"in other calls DataLoader\(examples"):
        la.calibrate(rows)


def test_who_writes_outputs_finds_answer_tokens():
    for call in (Laplace, lambda model, likelihood, **options: Laplace(model, likelihood).fit(examples(), **options)):
        with pytest.raises(
            ArgumentError, match=r"no option 'outputs'\. Write Laplace\(AnswerTokens\(model, token_ids\)"
        ):
            call(decoder(), "classification", outputs=[2, 3])


def test_a_trainer_of_another_network_or_loss_is_warned_of(tmp_path):
    trainer = trainer_of(classifier(), tmp_path, label_smoothing_factor=0.1)
    with pytest.warns(LaplaceWarning, match=r"Write .*Categorical\(label_smoothing=0\.1\)"):
        Laplace(trainer.model, "classification").fit(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        Laplace(trainer.model, Categorical(label_smoothing=0.1)).fit(trainer)
    with pytest.warns(LaplaceWarning, match=r"trains another network.*Laplace\(trainer\.model, \.\.\.\)"):
        Laplace(classifier(), "classification").fit(trainer_of(classifier(), tmp_path))


def test_an_encoder_and_decoder_needs_the_decoders_inputs():
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "tie_word_embeddings": False}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=9, **sizes, **ids)).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    batch = {"input_ids": torch.randint(1, 9, (4, 5)), "labels": torch.randint(1, 9, (4, 3))}
    with pytest.raises(ModelError, match=r"without its labels.*batch\['decoder_input_ids'\] = model\.prepare"):
        Laplace(model, "classification").fit([batch])
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    la = Laplace(model, "classification").fit([batch])
    assert float(la.loss) == pytest.approx(12 * float(model(**batch).loss), rel=1e-5)


def test_a_trainer_without_data_is_refused(tmp_path):
    trainer = trainer_of(classifier(), tmp_path)
    trainer.train_dataset = None
    with pytest.raises(InputError, match=r"this Trainer has no train_dataset.*collate_fn="):
        Laplace(trainer.model, "classification").fit(trainer)


@pytest.mark.parametrize("rows", [examples(), Sentences(examples())], ids=["a list", "a dataset"])
def test_a_dataset_with_its_collator(rows):
    model = classifier()
    la = Laplace(model, "classification").fit(rows, collate_fn=padded, batch_size=4)
    same = Laplace(model, "classification").fit(DataLoader(rows, batch_size=5, collate_fn=padded))
    assert_close(la.log_marginal_likelihood(), same.log_marginal_likelihood(), rtol=1e-5)


def test_a_dataset_of_tensors_needs_no_collator():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    model = nn.Linear(3, 2)
    la, same = Laplace(model, "classification").fit(data), Laplace(model, "classification").fit([data[:]])
    assert_close(la.log_marginal_likelihood(), same.log_marginal_likelihood(), rtol=1e-5)


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (DataLoader(examples(), collate_fn=padded), {"collate_fn": padded}, "a DataLoader makes its batches itself"),
        ([padded(examples())], {"batch_size": 4}, "batch_size= is for a dataset of single examples.*; a list"),
        (examples(), {"collate_fn": "pad"}, "collate_fn='pad' must be a function"),
        (examples(), {"collate_fn": padded, "batch_size": 0}, "batch_size=0"),
    ],
)
def test_options_of_datasets_that_do_not_fit(data, options, says):
    with pytest.raises(OptionError, match=says):
        Laplace(classifier(), "classification").fit(data, **options)


def test_a_batch_by_name_is_the_mapping():
    model, batch = classifier(), padded(examples())
    la = Laplace(model, "classification").fit([batch])
    assert torch.equal(la(**batch), la(batch))
    assert torch.equal(la.predict(**transformers.BatchEncoding(batch)).mean, la.predict(batch).mean)
    draws = [la.functional_samples(x, n_samples=3, generator=torch.Generator().manual_seed(0), **by_name)
             for x, by_name in ((batch, {}), (None, batch))]  # fmt: skip
    assert torch.equal(*draws)
    with pytest.raises(OptionError, match=r"no inputs. Write la\(x\), or la\(\*\*batch\)"):
        la()


# ---- what the network's own loss says ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "likelihood", "labels"),
    [
        ("single_label_classification", "classification", torch.arange(N) % C),
        ("multi_label_classification", "multilabel", (torch.arange(N * C).reshape(N, C) % 2).float()),
        ("regression", "regression", torch.linspace(-1, 1, N * C).reshape(N, C)),
    ],
)
@pytest.mark.filterwarnings("error:the network's own loss:laplace.errors.LaplaceWarning")
def test_the_loss_of_every_problem_type_is_ours_and_the_config_stays(problem, likelihood, labels):
    model, batch = classifier(), padded(examples()) | {"labels": labels}
    model.config.problem_type = before = problem if problem == "regression" else None  # found from labels, if left out
    la = Laplace(model, likelihood).fit([batch])
    assert model.config.problem_type == before
    model.config.problem_type = problem
    own = float(model(**batch).loss.detach())
    times = {"classification": N, "multilabel": N * C, "regression": N * C / 2}[likelihood]
    assert la.loss == pytest.approx(own * times, rel=1e-5)


def test_another_problem_type_is_warned_of():
    model, batch = classifier(), padded(examples()) | {"labels": torch.eye(C)[torch.arange(N) % C]}
    with pytest.warns(UserWarning, match=r"own loss on 5 examples.*It is that of likelihood='multilabel'"):
        Laplace(model, "classification").fit([batch])


def test_one_label_of_a_regression_has_no_second_dimension():
    model, batch = classifier(num_labels=1), padded(examples()) | {"labels": torch.linspace(-1, 1, N)}
    la = Laplace(model, "regression").fit([batch])
    assert la.loss == pytest.approx(float(model(**batch).loss.detach()) * N / 2, rel=1e-5)


def test_shifted_labels_are_in_the_summary():
    batch = padded(examples())
    batch["labels"] = batch["input_ids"].where(batch["attention_mask"] == 1, -100)
    la = Laplace(decoder(), "classification").fit([batch])
    assert "shifted to the next tokens" in repr(la)
    assert "shifted" not in repr(Laplace(classifier(), "classification").fit([padded(examples())]))


# ---- decoders ------------------------------------------------------------------------------------------------------


def test_a_right_padded_decoder_is_fitted_at_the_last_token_of_each_row():
    model = decoder("GPT2ForSequenceClassification", num_labels=C)
    batch, one_by_one = padded(examples()), [padded([row]) for row in examples()]
    options = {"feature_reduction": "pick_last", "hessian_structure": "full"}
    la = Laplace(model, "classification", **options).fit([batch])
    same = Laplace(model, "classification", **options).fit(one_by_one)  # without padding
    assert_close(la.H, same.H, rtol=1e-4)
    assert_close(la(**batch), torch.cat([same(**one) for one in one_by_one]), rtol=1e-4)
    everything = Laplace(model, "classification", ["score"], "full").fit([batch])
    assert_close(la.H, everything.H, rtol=1e-4)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_answer_tokens_are_rows_of_the_vocabularys_logits(subset):
    model, batch, ids = decoder(), padded(examples()), [3, 5, 2]
    answers = hf.AnswerTokens(model, ids)
    last = batch["attention_mask"].sum(1) - 1
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    expected = model(**inputs).logits[torch.arange(N), last][:, ids]
    assert_close(answers(**inputs), expected, rtol=1e-5)
    left = {key: torch.stack([row.roll(int((batch["attention_mask"][i] == 0).sum())) for i, row in enumerate(value)])
            for key, value in inputs.items()}  # fmt: skip
    places = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert_close(answers(**left, position_ids=places), expected, rtol=1e-4)
    assert answers.model.transformer.wte.weight is model.transformer.wte.weight
    assert answers.head.weight.shape == (3, 8)
    assert model.lm_head.out_features == len(WORDS)
    la = Laplace(answers, "classification", subset, "diag", feature_reduction="pick_last" if subset != "all" else None)
    la.fit([batch])
    loss = nn.functional.cross_entropy(expected, batch["labels"], reduction="sum")
    assert la.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert la(**batch).shape == (N, 3)


def test_answer_tokens_with_adapters_beside_a_frozen_base():
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = moved(peft.get_peft_model(decoder(), config))
    la = Laplace(hf.AnswerTokens(model, [3, 5, 2]), "classification", "all").fit([padded(examples())])
    assert all("lora_" in row.name for row in la.coverage())


@pytest.mark.parametrize("ids", [[3], [3, 3], [3, 99], ["A", "B"], None])
def test_answers_that_are_no_tokens_are_refused(ids):
    with pytest.raises(OptionError, match=r"token_ids=.* two or more different tokens from 0 to 7"):
        hf.AnswerTokens(decoder(), ids)


def test_answers_need_a_language_model():
    with pytest.raises(ModelError, match="the head of DistilBertForSequenceClassification is missing"):
        hf.AnswerTokens(classifier(), [1, 2])


# ---- callback, pipeline, folder -------------------------------------------------------------------------------------


def test_the_callback_fits_calibrates_and_saves_at_the_end(tmp_path, tokenizer):
    callback = hf.LaplaceCallback(hessian_structure="full")
    trainer = trainer_of(classifier(), tmp_path, [callback], eval_strategy="epoch")
    trainer.processing_class = trainer.callback_handler.processing_class = tokenizer
    trainer.train()
    la = callback.la
    assert la is not None
    assert la.n_data == N
    assert callback.result is not None
    same = Laplace(trainer.model, "classification", hessian_structure="full").fit(trainer)
    same.calibrate(DataLoader(examples(30, seed=2), batch_size=8, collate_fn=padded))
    assert float(la.prior_precision) == pytest.approx(float(same.prior_precision), rel=1e-3)
    assert la.softmax_temperature == pytest.approx(same.softmax_temperature, rel=1e-3)
    loaded = hf.BayesianModel.from_pretrained(tmp_path / "laplace")
    batch = padded(examples())
    assert torch.equal(loaded.la(**batch), la(**batch))
    assert (tmp_path / "laplace" / "tokenizer.json").exists()


def test_the_callback_without_evaluation(tmp_path):
    ways = [
        hf.LaplaceCallback("classification", tune="evidence", folder=False),
        hf.LaplaceCallback(tune="calibrate", eval_dataset=Sentences(examples(30, seed=2)), folder=False),
        hf.LaplaceCallback(tune="calibrate", folder=False),
    ]
    trainer = trainer_of(classifier(), tmp_path)
    trainer.train()
    given = {"model": trainer.model, "train_dataloader": trainer.get_train_dataloader(), "eval_dataloader": None}
    for callback in ways[:2]:
        callback.on_train_end(trainer.args, trainer.state, trainer.control, **given)
        assert callback.la is not None
        assert callback.result is not None
    assert not (tmp_path / "laplace").exists()
    with pytest.raises(InputError, match="needs evaluation data"):
        ways[2].on_train_end(trainer.args, trainer.state, trainer.control, **given)
    with pytest.raises(OptionError, match="tune='all'"):
        hf.LaplaceCallback(tune="all")


def test_wrong_options_of_the_callback_are_refused_before_training(tmp_path):
    with pytest.raises(ArgumentError, match="subset_of_weight"):
        hf.LaplaceCallback(subset_of_weight="all")
    with pytest.raises(OptionError, match="hessian_structure='krn'"):
        hf.LaplaceCallback(hessian_structure="krn")
    model = classifier()
    before = [p.detach().clone() for p in model.parameters()]
    trainer = trainer_of(model, tmp_path, [hf.LaplaceCallback(subset_of_weights=["nowhere.*"])])
    with pytest.raises(OptionError, match="nowhere"):
        trainer.train()
    trainer = trainer_of(transformers.DistilBertModel(model.config), tmp_path, [hf.LaplaceCallback()])
    with pytest.raises(OptionError, match="the likelihood of a DistilBertModel is not known"):
        trainer.train()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_likelihood_is_read_from_the_model():
    from laplace.integrations.huggingface.likelihood import likelihood_of

    assert likelihood_of(classifier()) == "classification"
    assert likelihood_of(classifier(num_labels=1)) == "regression"
    assert likelihood_of(classifier(problem_type="multi_label_classification")) == "multilabel"
    assert likelihood_of(decoder()) == "classification"
    with pytest.raises(OptionError, match="likelihood of a Linear is not known"):
        likelihood_of(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["classification", "multilabel"])
def test_a_pipeline_gives_the_scores_of_the_predictive(kind, tokenizer):
    model = classifier(problem_type="multi_label_classification") if kind == "multilabel" else classifier()
    labels = torch.eye(C)[torch.arange(N) % C] if kind == "multilabel" else torch.arange(N) % C
    la = Laplace(model, kind).fit([padded(examples()) | {"labels": labels}])
    texts = ["good film", "the bad plot of a film", "a"]
    wrapped = hf.BayesianModel(la)
    options = {"model": wrapped, "tokenizer": tokenizer, "top_k": None}
    plain = transformers.pipeline("text-classification", **options)
    unsure = transformers.pipeline("text-classification", pipeline_class=hf.UncertainTextClassification, **options)
    for text, answer, with_doubt in zip(texts, plain(texts), unsure(texts), strict=True):
        tokens = tokenizer(text, return_tensors="pt")
        tokens.pop("token_type_ids", None)
        expected = la.predict(**tokens, generator=torch.Generator().manual_seed(0))
        p, doubt = expected.mean[0], expected.epistemic[0]
        for i in range(C):
            (own,) = (each for each in answer if each["label"] == f"LABEL_{i}")
            assert own["score"] == pytest.approx(float(p[i]), rel=1e-4)
            (own,) = (each for each in with_doubt if each["label"] == f"LABEL_{i}")
            assert own["epistemic"] == pytest.approx(float(doubt[i] if doubt.dim() else doubt), rel=1e-4)
    if kind == "multilabel":  # the likelihood says so where the configuration does not
        model.config.problem_type = None
        (again,) = transformers.pipeline("text-classification", **options | {"model": hf.BayesianModel(la)})(texts[:1])
        assert again == plain(texts[:1])[0]
        assert model.config.problem_type is None
    (one,) = transformers.pipeline(
        "text-classification", model=wrapped, tokenizer=tokenizer, pipeline_class=hf.UncertainTextClassification
    )(texts[:1])
    assert one.keys() == {"label", "score", "epistemic"}


def test_a_model_before_fit_is_refused():
    with pytest.raises(NotFittedError):
        hf.BayesianModel(Laplace(classifier(), "classification"))


def adapted(seed: int = 0) -> Any:
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_lin", "v_lin"])
    return moved(peft.get_peft_model(classifier(seed), config))


@pytest.mark.parametrize("make", [classifier, adapted])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_folder_brings_back_the_same_predictions(make, subset, tmp_path):
    model, batch = make(), padded(examples())
    if make is classifier:
        model.distilbert.embeddings.requires_grad_(False)
    la = Laplace(model, "classification", subset).fit([batch])
    la.tune()
    hf.BayesianModel(la).save_pretrained(tmp_path)
    loaded = hf.BayesianModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.la(**batch), la(**batch))
    assert loaded.la.n_params == la.n_params
    suffixes = {file.suffix for file in tmp_path.iterdir()}
    assert suffixes <= {".json", ".safetensors", ".md"}
    again = hf.BayesianModel.from_pretrained(tmp_path, model)
    assert torch.equal(again(**batch).logits, loaded(**batch).logits)


def test_a_posterior_alone_needs_its_network(tmp_path):
    model, batch = classifier(), padded(examples())
    la = Laplace(model, "classification").fit([batch])
    hf.BayesianModel(la).save_pretrained(tmp_path, with_network=False)
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"cannot be loaded.*from_pretrained\(folder, model\)"):
        hf.BayesianModel.from_pretrained(tmp_path)
    assert torch.equal(hf.BayesianModel.from_pretrained(tmp_path, model).la(**batch), la(**batch))
    with pytest.raises(CheckpointError, match="another network"):
        hf.BayesianModel.from_pretrained(tmp_path, classifier(seed=1))


@pytest.mark.parametrize("name", ["os", "pipeline", "AutoModel", "Trainer", "nowhere"])
def test_a_folder_can_name_nothing_but_a_model(name, tmp_path):
    la = Laplace(classifier(), "classification").fit([padded(examples())])
    hf.BayesianModel(la).save_pretrained(tmp_path)
    details = json.loads((tmp_path / "laplace.json").read_text())
    (tmp_path / "laplace.json").write_text(json.dumps(details | {"architecture": name}))
    with pytest.raises(CheckpointError, match=rf"'{name}', which is no model of transformers"):
        hf.BayesianModel.from_pretrained(tmp_path)
    (tmp_path / "laplace.json").unlink()
    with pytest.raises(CheckpointError, match=r"no usable laplace\.json"):
        hf.BayesianModel.from_pretrained(tmp_path)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("laplace.integrations.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'laplace-redux\[hf\]'"):
        importlib.import_module("laplace.integrations.huggingface")
