"""Hugging Face: a callback for its trainer, networks with uncertainty for its pipelines, folders, answer tokens.

Models of transformers and adapters of peft work without this module: `Laplace` accepts them, their batches and their
trainer directly. Needs transformers: pip install 'laplace-redux[hf]'.
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError("laplace.integrations.huggingface needs transformers: pip install 'laplace-redux[hf]'") from error

from laplace.integrations.huggingface.answers import AnswerTokens
from laplace.integrations.huggingface.callback import LaplaceCallback
from laplace.integrations.huggingface.model import BayesianModel, UncertainOutput
from laplace.integrations.huggingface.pipeline import UncertainTextClassification

__all__ = ["AnswerTokens", "BayesianModel", "LaplaceCallback", "UncertainOutput", "UncertainTextClassification"]
