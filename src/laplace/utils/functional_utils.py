"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.batches import (
    batch_size,
    classification_targets,
    concatenate_rows,
    draw_gaussian,
    preserve_model_gradients,
    regression_targets,
    same_configuration,
    select_rows,
    split_batch,
    subset_loader,
    to_device,
    training_indices,
)

__all__ = [
    "batch_size",
    "classification_targets",
    "concatenate_rows",
    "draw_gaussian",
    "preserve_model_gradients",
    "regression_targets",
    "same_configuration",
    "select_rows",
    "split_batch",
    "subset_loader",
    "to_device",
    "training_indices",
]
