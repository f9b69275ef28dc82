"""Groups of processes that the tests of this folder share: starting them takes longer than most checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def some(request) -> Iterator[Pool]:
    pool = Pool(request.param)
    yield pool
    pool.close()
