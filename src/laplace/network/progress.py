"""Show progress bars, in terminals and for runs that take more than a few seconds."""

from __future__ import annotations

from collections.abc import Iterable
from operator import length_hint
from typing import Any, Final

from tqdm.auto import tqdm

PATIENCE: Final = 3.0  # seconds that pass before a bar nobody asked for is shown


def with_bar(loader: Iterable[Any], progress: bool | None, what: str) -> Iterable[Any]:
    """Yield the batches of a loader behind a progress bar; see `bar`."""
    total = length_hint(loader, 0) or None  # a loader over an iterable dataset has a len() that fails
    return bar(progress, loader, desc=what, total=total, unit="batch", leave=False)


def bar(progress: bool | None, iterable: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return a progress bar.

    Args:
        progress: True shows it, False does not. None shows it if stderr is a terminal and the work takes more than a
            few seconds, so that nothing appears in pipes, log files and short runs.
        iterable: What is gone through.
        **options: As tqdm takes them.
    """
    if progress is None:
        return tqdm(iterable, disable=None, delay=PATIENCE, **options)
    return tqdm(iterable, disable=not progress, **options)
