"""A run without its training: the real run folder and checkpoint writer, for records of what they
do to files.

    python tests/helpers/saving_run.py FOLDER

writes FOLDER/run, and FOLDER/reported-N once the checkpoint of step N is saved.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fastaug.config import TrainConfig
from fastaug.runs.folder import RunFolder

STEPS, STEPS_PER_EPOCH = 5, 2
STOP = 4
"""The step after which the run ends and is resumed."""
CONFIG = TrainConfig.from_flat(log=("none",), keep_checkpoints=2)
_NETWORK = {"head.weight": torch.zeros(2, 8), "head.bias": torch.zeros(2)}


def state_after(step: int) -> dict[str, Any]:
    """Every second step ends an epoch, whose evaluation is the best so far."""
    epochs = step // STEPS_PER_EPOCH
    return {
        "config": CONFIG.to_flat(),
        "classes": ["cat", "dog"],
        "model": {name: torch.full_like(own, float(step)) for name, own in _NETWORK.items()},
        "ema": None,
        "step": step,
        "evaluated_epochs": epochs,
        "best_top1": epochs / 10 if epochs else -1.0,
    }


def records_until(step: int) -> list[tuple[str, int]]:
    """The records that a run has written when it has saved a step, without those of its end."""
    found = []
    for done in range(1, step + 1):
        found.append(("train", done))
        if done % STEPS_PER_EPOCH == 0:
            found.append(("eval", done))
    return found


def take_steps(run: RunFolder, first: int, last: int, reports: Path) -> None:
    for step in range(first, last + 1):
        run.write("train", step, {"loss": 1.0}, {})
        ends_epoch = step % STEPS_PER_EPOCH == 0
        if ends_epoch:
            run.write("eval", step, {"epoch": step // STEPS_PER_EPOCH, "top1": 0.5}, {})
        run.save(state_after(step), best=ends_epoch)
        while run._checkpoints._waiting:
            time.sleep(0.001)
        (reports / f"reported-{step}").touch()
        for folder in (reports,):
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def main(folder: Path) -> None:
    config = CONFIG.replace(out=str(folder / "run"))
    with RunFolder(config, say=print).open() as run:
        take_steps(run, 1, STOP, folder)
        run.write("final", STOP, {"top1": 0.5}, {})
        run.write_summary({"finished": True})
    epochs = STOP // STEPS_PER_EPOCH
    resumed = RunFolder(config, say=print, resume_step=STOP, evaluated_epochs=epochs)
    with resumed.open() as run:
        run.remove_summary()
        take_steps(run, STOP + 1, STEPS, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
