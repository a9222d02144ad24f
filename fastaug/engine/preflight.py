"""What a run begins with: checks that take little time, and the device.

Before data is scanned and kernels are compiled.
"""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from fastaug.config import TrainConfig
from fastaug.engine.parameter_groups import freeze
from fastaug.errors import few
from fastaug.models.build import check_configured_model, check_patches
from fastaug.runs.config import RunConfig
from fastaug.runs.folder import check_unused, check_writable
from fastaug.runs.loggers.open import make_loggers
from fastaug.runtime.arithmetic import set_arithmetic
from fastaug.runtime.device import (
    avoid_broken_cpu_arithmetic,
    check_compiler,
    keep_freed_memory,
    use_device,
)
from fastaug.runtime.distributed import Group
from fastaug.runtime.torchrun import num_nodes
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


def prepare_device(config: RunConfig) -> torch.device:
    """The device of this rank, with the arithmetic and the memory settings of a run."""
    device = use_device(config.device)
    set_arithmetic(device, config.precision, deterministic=config.deterministic)
    avoid_broken_cpu_arithmetic(device, config.precision)
    keep_freed_memory(device)
    if config.compile != "off":
        check_compiler(device)
    return device


def warning_if_unshared(folder: Path, group: Group) -> str:
    """A warning if a machine does not see the run folder, which rank 0 has opened; "" if all do."""
    if num_nodes() == 1:
        return ""
    sees = group.gather((socket.gethostname(), (folder / "config.json").exists()))
    blind = sorted({name for name, sees_it in sees if not sees_it})
    if not blind:
        return ""
    return (
        f"warning: --out {folder} is not on a disk that all machines share: {few(blind)} cannot "
        "see it; after a restart with rank 0 on such a machine the run would start from the "
        "beginning"
    )
