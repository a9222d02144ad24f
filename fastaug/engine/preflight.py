"""Checks of a run that take little time, before data is scanned and kernels are compiled."""

from __future__ import annotations

from pathlib import Path

from fastaug.config import TrainConfig
from fastaug.engine.parameter_groups import freeze
from fastaug.models.build import check_configured_model, check_patches
from fastaug.runs.folder import check_unused, check_writable
from fastaug.runs.loggers.open import make_loggers
from fastaug.views.resizing import sizes_of_training


def check_before_start(config: TrainConfig, folder: Path, *, is_new: bool) -> None:
    """Raise ConfigError if the run folder, the model or the loggers cannot be used."""
    check_writable(folder)
    if is_new:
        check_unused(folder)
    model = check_configured_model(
        config.model, sizes_of_training(config.view, config.optim.epochs)
    )
    if is_new:  # a run of an earlier version can be resumed
        check_patches(config.model.model, model, config.view.size)
    freeze(model, config.optim.freeze)  # checks the names
    make_loggers(config.run.log)
