"""Suites that parts of one's own inherit: they compare with dense float64 references that are made here.

    class TestMine(StructureConformance):
        def structure(self):
            return MyStructure()

pytest collects every method `test_...`; nothing here imports pytest.
"""

from laplace.testing.likelihoods import LikelihoodConformance
from laplace.testing.structures import StructureConformance

__all__ = ["LikelihoodConformance", "StructureConformance"]
