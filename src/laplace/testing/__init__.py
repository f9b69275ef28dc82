"""Provide test suites for your own structures and likelihoods. They compare with dense float64 references.

    class TestMine(StructureConformance):
        def structure(self):
            return MyStructure()

pytest collects every method `test_...`. Nothing here imports pytest.
"""

from laplace.testing.likelihoods import LikelihoodConformance
from laplace.testing.structures import StructureConformance

__all__ = ["LikelihoodConformance", "StructureConformance"]


def __dir__() -> list[str]:
    return __all__
