"""Read from a model of transformers which likelihood it was trained by."""

from __future__ import annotations

from typing import Any, Final

from laplace.errors import OptionError

PROBLEMS: Final = {  # `problem_type` of a configuration, and its likelihood
    "single_label_classification": "classification",
    "multi_label_classification": "multilabel",
    "regression": "regression",
}
_CLASSES: Final = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification", "ForImageClassification")


def likelihood_of(model: Any) -> str:
    """Return the likelihood of a model's own loss, from its configuration and the name of its class.

    `fit` compares it with that loss on the first batch.
    """
    inner = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    config, name = getattr(inner, "config", None), type(inner).__name__
    if (problem := getattr(config, "problem_type", None)) in PROBLEMS:
        return PROBLEMS[problem]
    if name.endswith(_CLASSES):
        return "classification"
    if name.endswith("ForSequenceClassification"):
        return "classification" if getattr(config, "num_labels", 2) > 1 else "regression"
    raise OptionError(
        f"the likelihood of a {name} is not known. Write likelihood='classification', 'multilabel' or 'regression'."
    )
