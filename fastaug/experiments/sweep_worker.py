"""The workers of a sweep on this machine: threads that each see to one training at a time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.experiments.sweep_options import SweepConfig
from fastaug.experiments.sweep_plan import Configs, Plan, study_name
from fastaug.experiments.sweep_progress import SweepProgress
from fastaug.experiments.sweep_study import Stage
from fastaug.experiments.sweep_training import (
    RunDiverged,
    RunFailed,
    finished_summary,
    run_training,
)
from fastaug.runtime.cores import core_count
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage

_LOOK_AGAIN = 1.0
_MOST_ON_A_CPU = 8


@dataclass(frozen=True)
class Slot:
    """A part of this machine that one training has."""

    number: int
    environment: Mapping[str, str]


def slots(options: SweepConfig, device: str) -> list[Slot]:
    """As many as --jobs says, with GPUs or cores of their own."""
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if gpus:
        jobs = options.jobs or max(1, gpus // options.ranks)
        if jobs * options.ranks > gpus:
            raise ConfigError(
                f"--jobs {jobs} x --ranks {options.ranks} are more than the {gpus} GPUs here"
            )
        return [Slot(i, {"CUDA_VISIBLE_DEVICES": _gpus(i, options.ranks)}) for i in range(jobs)]
    cores = core_count()
    jobs = options.jobs or max(1, min(cores // options.ranks, _MOST_ON_A_CPU))
    # torch's threads of several processes on the same cores wait for one another.
    threads = str(max(1, cores // (jobs * options.ranks)))
    given = os.environ.get("OMP_NUM_THREADS", threads)
    return [Slot(i, {"OMP_NUM_THREADS": given}) for i in range(jobs)]


def _gpus(slot: int, ranks: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return ",".join(names[slot * ranks : (slot + 1) * ranks])


def run_stage(
    plan: Plan, title: str, configs: Configs, storage: RDBStorage, interrupt: StopSignals
) -> frozenset[str]:
    """Until every run of a stage is done or has failed for good, here or elsewhere; returns those
    that have failed."""
    options = plan.options
    device = next(iter(configs.values())).run.device
    name = study_name(options, title, configs)

    def stage() -> Stage:
        return Stage(storage, name, list(configs), options.heartbeat)

    shared = stage()
    shared.give_failed_another_chance()
    errors: list[BaseException] = []
    with SweepProgress(title, len(configs)) as progress:
        threads = []
        for slot in slots(options, device):
            worker = _Worker(plan, configs, stage(), slot, progress, interrupt, errors)
            threads.append(threading.Thread(target=worker.run, daemon=True))
        for thread in threads:
            thread.start()
        # Not join alone: signals are for the main thread.
        while any(thread.is_alive() for thread in threads):
            progress.stand(shared.standing())
            time.sleep(_LOOK_AGAIN / 2)
        standing = shared.standing()
        progress.stand(standing)
    for error in errors:
        raise error
    return standing.failed


class _Worker:
    def __init__(
        self,
        plan: Plan,
        configs: Configs,
        stage: Stage,
        slot: Slot,
        progress: SweepProgress,
        interrupt: StopSignals,
        errors: list[BaseException],
    ) -> None:
        self._plan, self._configs, self._stage, self._slot = plan, configs, stage, slot
        self._progress, self._interrupt, self._errors = progress, interrupt, errors

    def run(self) -> None:
        """Errors of the sweep as a whole end all workers here: the others look at the list."""
        try:
            for _ in self._while_there_is_work():
                try:
                    self._stage.work_on_one(self._train, self._plan.options.retries)
                except RunFailed as failure:  # noqa: PERF203  (of this run alone)
                    self._progress.line(f"warning: {failure}")
        except BaseException as error:
            self._errors.append(error)

    def _while_there_is_work(self) -> Iterator[None]:
        while not self._is_asked_to_end():
            self._stage.notice_the_dead()
            if self._stage.standing().can_start:
                yield
            elif self._stage.is_settled():
                return
            else:  # others work on the last ones, which they may lose
                time.sleep(_LOOK_AGAIN)
        if self._interrupt.signum:
            raise TrainingInterruptedError(self._interrupt.signum)

    def _is_asked_to_end(self) -> int:
        return self._interrupt.signum or (15 if self._errors else 0)

    def _train(self, name: str, trial: optuna.Trial) -> float:
        config, folder = self._configs[name], run_folder(self._plan, name)
        trial.set_user_attr("worker", f"{socket.gethostname()} {os.getpid()} {self._slot.number}")
        summary = finished_summary(folder)
        if summary is None:
            try:
                summary = self._run(name, config, folder)
            except RunDiverged as diverged:  # a result: no setting chooses it
                self._progress.line(str(diverged))
                return 0.0
        for key, value in _described(config, summary).items():
            trial.set_user_attr(key, value)
        score = self._score(summary)
        self._progress.line(f"{name}: {self._plan.options.select_on} top-1 {100 * score:.1f}%")
        return score

    def _run(self, name: str, config: TrainConfig, folder: Path) -> dict[str, Any]:
        with self._progress.run(name, self._plan.steps(config)) as on_step:
            return run_training(
                config,
                folder,
                ranks=self._plan.options.ranks,
                environment=self._slot.environment,
                on_step=on_step,
                signum=self._is_asked_to_end,
            )

    def _score(self, summary: dict[str, Any]) -> float:
        held_out = self._plan.options.select_on == "validation"
        return summary["validation" if held_out else "measures"]["top1"]


def run_folder(plan: Plan, name: str) -> Path:
    return plan.folder / "runs" / name


def _described(config: TrainConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """What the storage knows of a run: enough for machines that do not see its folder, and for
    Optuna's own tools."""
    varied = {name: getattr(config, name) for name in ("views", "average", "kl_weight", "lr")}
    varied |= {"epochs": config.optim.epochs, "seed": config.run.seed}
    return {**varied, "config": config.to_flat(), "summary": summary}
