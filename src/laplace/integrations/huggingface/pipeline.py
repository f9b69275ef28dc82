"""Text classification with the uncertainty in its answers."""

from __future__ import annotations

from typing import Any, cast

from transformers import TextClassificationPipeline


class UncertainTextClassification(TextClassificationPipeline):
    """Classifies texts with a `BayesianModel`: each answer has `label`, `score` and `epistemic`.

    `pipeline("text-classification", model=..., tokenizer=..., pipeline_class=UncertainTextClassification)`.
    """

    def check_model_type(self, supported_models: Any) -> None:
        """Accept the model: it is one of transformers, with a posterior.

        Args:
            supported_models: not used.
        """

    def postprocess(self, model_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the answers of the pipeline, with the epistemic uncertainty of each.

        Args:
            model_outputs: what the model returned for one text.
            *args: passed on.
            **kwargs: passed on.
        """
        answers = super().postprocess(model_outputs, *args, **kwargs)
        doubt, config = model_outputs["epistemic"][0], cast(Any, self.model).config
        for answer in [answers] if isinstance(answers, dict) else answers:  # of labels, each has its own
            own = doubt if doubt.dim() == 0 else doubt[config.label2id[answer["label"]]]
            answer["epistemic"] = own.item()
        return answers
