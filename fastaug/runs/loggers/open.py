"""From the names of --log to loggers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, describe_error
from fastaug.runs.config import NO_LOGGER
from fastaug.runs.loggers.background import BackgroundLogger
from fastaug.runs.loggers.base import METHODS, Logger
from fastaug.runs.loggers.mlflow import MlflowLogger
from fastaug.runs.loggers.tensorboard import TensorBoardLogger
from fastaug.runs.loggers.trackio import TrackioLogger
from fastaug.runs.loggers.wandb import WandbLogger
from fastaug.runtime.plugins import accepts_call

_OWN: dict[str, tuple[Callable[[], Logger], str]] = {
    "tensorboard": (TensorBoardLogger, "tensorboard"),
    "wandb": (WandbLogger, "wandb"),
    "mlflow": (MlflowLogger, "mlflow-skinny"),
    "trackio": (TrackioLogger, "trackio"),
}
"""Name, which is also that of the package -> the logger, and what to pip install."""


def open_loggers(
    config: TrainConfig, resume_step: int | None, say: Callable[[str], None]
) -> list[Logger]:
    """The started loggers of a run. All but TensorBoard's work in threads of their own."""
    made = make_loggers(config.run.log)
    loggers = [
        logger if name == "tensorboard" else BackgroundLogger(name, logger, say)
        for name, logger in made.items()
    ]
    for logger in loggers:
        logger.start(Path(config.run.out), config.to_flat(), resume_step)
    return loggers


def make_loggers(names: Iterable[str]) -> dict[str, Logger]:
    """Name -> logger, not started yet. Raises ConfigError if one cannot be used here."""
    return {name: _make(name) for name in names if name != NO_LOGGER}


def _make(name: str) -> Logger:
    if name not in _OWN:
        return _import_logger(name)
    make, package = _OWN[name]
    if find_spec(name) is None:
        raise ConfigError(f"--log {name}: the package is not installed; pip install {package}")
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:  # a broken or very old installation
        raise ConfigError(f"--log {name}: cannot be used ({describe_error(error)})") from error


def _import_logger(address: str) -> Logger:
    """An instance of the class, or what the function returns, at package.module:attribute."""
    module, _, attribute = address.partition(":")
    try:
        made: Any = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # someone else's module may raise anything
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
            f"{error.name}."
        )
        advice = "; set PYTHONPATH to the folder that has it" if is_missing else ""
        raise ConfigError(
            f"--log {address}: cannot be loaded ({describe_error(error)}){advice}"
        ) from error
    wrong = [
        f"{method}({', '.join(arguments)})"
        for method, arguments in METHODS.items()
        if not accepts_call(getattr(made, method, None), arguments)
    ]
    if wrong:
        raise ConfigError(
            f"--log {address}: {type(made).__name__} cannot be called as {', '.join(wrong)}; "
            "a logger has start, log, picture and close (fastaug/runs/loggers/base.py)"
        )
    return made
