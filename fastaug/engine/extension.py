"""A resumed run with another --epochs: allowed if the steps so far would have been the same."""

from __future__ import annotations

from pathlib import Path

from fastaug.config import TrainConfig
from fastaug.engine.optim import learning_rate
from fastaug.errors import CheckpointError
from fastaug.runs.resume import run_of


def check_new_length(
    saved: TrainConfig, config: TrainConfig, step: int, steps_per_epoch: int, name: str
) -> str:
    """What changes, as a line; raises CheckpointError if a run that had begun with the new --epochs
    would not have come to this checkpoint.

    saved: the config of the checkpoint; step: its step; name: its path.
    """
    old, new = saved.optim, config.optim
    given = f"--epochs {new.epochs}: {name} was trained with --epochs {old.epochs}"
    total = new.epochs * steps_per_epoch
    if total < step:
        least = -(-step // steps_per_epoch)
        raise CheckpointError(
            f"{given} and is at step {step:,}, beyond {total:,}; give at least {least}"
        )
    run, view = run_of(Path(name)), config.view
    restart = (
        "for a new run from its weights: "
        f"--config {run} --weights {run} --epochs {new.epochs} --out NEW"
    )
    if view.initial_size:
        raise CheckpointError(
            f"--epochs {new.epochs}: the view sizes of {name} (--size {view.initial_size}:"
            f"{view.size}) were scheduled for {old.epochs} epochs, so --epochs cannot change; "
            f"{restart}"
        )
    images = config.images_per_step
    for done in range(step):
        rates = [learning_rate(done, steps_per_epoch, own, images) for own in (old, new)]
        if rates[0] != rates[1]:
            raise CheckpointError(
                f"{given} and --schedule {new.schedule}: step {done + 1:,} of {step:,} had the "
                f"learning rate {rates[0]:.6g} and would have {rates[1]:.6g}; omit --epochs, or "
                f"{restart}"
            )
    return (
        f"--epochs changed from {old.epochs} to {new.epochs}: {total:,} steps instead of "
        f"{old.epochs * steps_per_epoch:,}; the learning rates of the steps so far are the same"
    )
