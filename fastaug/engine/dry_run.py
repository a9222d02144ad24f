"""--dry-run: everything up to a real training step and an evaluated batch, without a run folder."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from fastaug.config import TrainConfig
from fastaug.engine.optim import learning_rate
from fastaug.engine.trainer import Trainer
from fastaug.runs.console import show_table
from fastaug.runtime.arithmetic import arithmetic_in_force
from fastaug.runtime.distributed import Group

STEPS = 2
"""The first step also starts the loader and compiles; the last one is timed."""


def dry_run(config: TrainConfig, checkpoint: Path | None, group: Group) -> None:
    """Build all that a run needs, take some steps, and print a table. Nothing is written but
    caches."""
    trainer = Trainer(config, checkpoint, group)
    if config.view.initial_size:  # growing views take most memory at the end
        trainer.loader.set_epoch(config.optim.epochs - 1)
    seconds, losses = _train(trainer)
    trainer.drift.check_now(trainer.step + len(seconds))
    evaluated = _evaluate_batch(trainer)
    memory = group.gather(_peak_memory(trainer.device))
    if group.is_first:
        rows = [*_setup_rows(trainer), *_step_rows(trainer, seconds, losses), evaluated]
        rows.append(("peak memory", ", ".join(dict.fromkeys(memory))))
        show_table("dry run: nothing was written", rows)


def _train(trainer: Trainer) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step, all parts of it included."""
    learner, parts = trainer.learner, trainer.config.optim.accumulate
    learner.model.train()
    seconds, losses = [], []
    batches = iter(trainer.loader)
    steps = min(STEPS, trainer.steps_per_epoch, trainer.last_step - trainer.step)
    for step in range(trainer.step, trainer.step + steps):
        started = time.perf_counter()
        learner.start_step(step)
        terms = [
            learner.backward(batch, 1 / parts, last=part + 1 == parts)
            for part, batch in zip(range(parts), batches, strict=False)
        ]
        if len(terms) < parts:  # a resumed run at the end of an epoch
            learner.abandon_step()
            break
        optim, images = trainer.config.optim, trainer.config.images_per_step
        learner.update(learning_rate(step, trainer.steps_per_epoch, optim, images))
        loss = torch.stack([part.loss for part in terms]).mean()
        losses.append(trainer.group.mean_(loss).item())  # waits for the device
        seconds.append(time.perf_counter() - started)
    return seconds, losses


class _FirstBatchDoneError(Exception):
    """Ends an evaluation after its first batch."""


def _evaluate_batch(trainer: Trainer) -> tuple[str, str]:
    def stop(done: int, total: int) -> None:
        raise _FirstBatchDoneError(total)

    evaluation, views = trainer.evaluations[0], trainer.config.eval.eval_views
    try:
        evaluation.measure(trainer.learner.evaluated_model, views=views, on_batch=stop)
    except _FirstBatchDoneError as done:
        (total,) = done.args
    return "evaluation", f"1 of {total:,} batches of an epoch's evaluation done"


def _setup_rows(trainer: Trainer) -> list[tuple[str, str]]:
    config = trainer.config
    what, steps, *remarks = trainer.describe()
    parameters = sum(parameter.numel() for parameter in trainer.learner.model.parameters())
    return [
        ("run", f"{what}\n{steps.removesuffix(f'; run folder {config.run.out}')}"),
        *[("note", remark) for remark in remarks],
        ("steps", f"{trainer.steps_per_epoch:,} in each of {config.optim.epochs:,} epochs"),
        ("model", f"{config.model.model}, {parameters:,} parameters"),
        ("loss kernel", trainer.learner.kernel.name),
        ("views", f"{config.data.loader} loader, views engine: {trainer.loader.engine_name}"),
        ("precision", arithmetic_in_force(trainer.device, config.run.precision)),
    ]


def _step_rows(
    trainer: Trainer, seconds: list[float], losses: list[float]
) -> list[tuple[str, str]]:
    if not seconds:
        return [("training", "nothing left to train")]
    views = trainer.config.optim.batch_size
    of_epoch = seconds[-1] * trainer.steps_per_epoch
    epoch = f"{of_epoch:.1f} s" if of_epoch < 60 else timedelta(seconds=round(of_epoch))
    shown = ", then ".join(f"{loss:.4f}" for loss in losses)
    view = trainer.config.view
    of_size = f", with views of {view.size} px, the last size" if view.initial_size else ""
    return [
        ("loss", shown),
        ("step", f"{seconds[-1]:.3f} s, {views / seconds[-1]:,.0f} views/s{of_size}"),
        ("epoch", f"roughly {epoch}, by this one step, without evaluation"),
    ]


def _peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB on {device}"
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    unit = 1 if sys.platform == "darwin" else 1024
    used = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{used / 1e9:.1f} GB in the process, without workers of the loader"
