"""Decisions under uncertainty: which inputs to label, which option to choose, functions to maximise."""

from laplace.decisions.active_learning import METHODS, Acquisition, acquire, score
from laplace.decisions.bandits import RULES, choose
from laplace.decisions.functions import DrawnFunctions, draw_functions

__all__ = [
    "METHODS",
    "RULES",
    "Acquisition",
    "DrawnFunctions",
    "acquire",
    "choose",
    "draw_functions",
    "score",
]


def __dir__() -> list[str]:
    return __all__
