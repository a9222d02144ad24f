"""The workers of a sweep on this machine: threads that each run one training at a time."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, printable
from fastaug.experiments.report_format import number
from fastaug.experiments.sweep_config import GRID, SweepConfig
from fastaug.experiments.sweep_plan import Configs, Plan
from fastaug.experiments.sweep_study import Stage, StageStatus
from fastaug.experiments.training_process import (
    RunDivergedError,
    RunFailedError,
    finished_summary,
    run_training,
)
from fastaug.runtime.atomic import write_json
from fastaug.runtime.cores import core_count
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage

_POLL_SECONDS = 1.0
_MAX_CPU_JOBS = 8


@dataclass(frozen=True)
class Slot:
    """The share of this machine that one training gets."""

    number: int
    environment: Mapping[str, str]


def machine_slots(sweep: SweepConfig, device: str) -> list[Slot]:
    """--jobs slots, each with its own GPUs or cores."""
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if gpus:
        jobs = sweep.jobs or max(1, gpus // sweep.ranks)
        if jobs * sweep.ranks > gpus:
            raise ConfigError(
                f"--jobs {jobs} x --ranks {sweep.ranks} needs {jobs * sweep.ranks} GPUs, but there "
                f"are {gpus}; lower --jobs or --ranks"
            )
        return [Slot(i, {"CUDA_VISIBLE_DEVICES": _gpus(i, sweep.ranks)}) for i in range(jobs)]
    cores = core_count()
    jobs = sweep.jobs or max(1, min(cores // sweep.ranks, _MAX_CPU_JOBS))
    # More threads than cores slow all processes down.
    threads = str(max(1, cores // (jobs * sweep.ranks)))
    return [
        Slot(i, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)})
        for i in range(jobs)
    ]


def _gpus(slot: int, ranks: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return ",".join(names[slot * ranks : (slot + 1) * ranks])


def run_stage(
    plan: Plan, title: str, configs: Configs, storage: RDBStorage, interrupt: StopSignals
) -> frozenset[str]:
    """Run a stage until every run is done or has failed, on this or another machine; returns the
    failed runs. Results of runs on other machines are fetched from the storage."""
    device = next(iter(configs.values())).run.device
    name = plan.study_name(title, configs)

    def stage() -> Stage:
        return Stage(storage, name, list(configs), plan.sweep.heartbeat)

    shared = stage()
    shared.requeue_failed()
    errors: list[BaseException] = []
    with SweepProgress(title, len(configs)) as progress:
        threads = []
        for slot in machine_slots(plan.sweep, device):
            worker = _Worker(plan, configs, stage(), slot, progress, interrupt, errors)
            threads.append(threading.Thread(target=worker.run, daemon=True))
        for thread in threads:
            thread.start()
        # Polled: a join would keep the main thread from handling signals.
        while any(thread.is_alive() for thread in threads):
            progress.update(shared.status())
            time.sleep(_POLL_SECONDS / 2)
        status = shared.status()
        progress.update(status)
    for error in errors:
        raise error
    for run, attributes in shared.results():
        folder = plan.run_folder(run)
        if not (folder / "summary.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "config.json", attributes["config"])
            write_json(folder / "summary.json", attributes["summary"])
    return status.failed


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
        """Train runs until none is left. An error that ends the sweep goes into a list that the
        workers share: each stops when there is one."""
        try:
            for _ in self._while_there_is_work():
                try:
                    self._stage.run_one(self._train, self._plan.sweep.retries)
                except RunFailedError as failure:
                    self._progress.line(f"warning: {failure}")
        except BaseException as error:
            self._errors.append(error)

    def _while_there_is_work(self) -> Iterator[None]:
        while not self._stop_signal():
            self._stage.requeue_lost()
            if self._stage.status().can_start:
                yield
            elif self._stage.is_settled():
                return
            else:  # other workers have the last runs, and may be lost
                time.sleep(_POLL_SECONDS)
        if self._interrupt.signum:
            raise TrainingInterruptedError(self._interrupt.signum)

    def _stop_signal(self) -> int:
        return self._interrupt.signum or (15 if self._errors else 0)

    def _train(self, name: str, trial: optuna.Trial) -> float:
        config, folder = self._configs[name], self._plan.run_folder(name)
        trial.set_user_attr("worker", f"{socket.gethostname()} {os.getpid()} {self._slot.number}")
        summary = finished_summary(folder)
        if summary is None:
            try:
                summary = self._start(name, config, folder)
            except RunDivergedError as diverged:  # counts as a result that is never chosen
                self._progress.line(str(diverged))
                return 0.0
        # For machines that do not see the folder, and for Optuna's own tools.
        attributes = {key: config.get(key) for key in (*GRID, "seed")}
        for key, value in {**attributes, "config": config.to_flat(), "summary": summary}.items():
            trial.set_user_attr(key, value)
        select_on = self._plan.sweep.select_on
        images = "validation" if select_on == "validation" else "measures"
        found = summary.get(images)
        top1 = number(found.get("top1")) if isinstance(found, dict) else None
        if top1 is None:
            raise RunFailedError(
                f"{folder}: summary.json has no {images} with a top1; remove the folder"
            )
        self._progress.line(f"{name}: {select_on} top-1 {100 * top1:.1f}%")
        return top1

    def _start(self, name: str, config: TrainConfig, folder: Path) -> dict[str, Any]:
        with self._progress.run(name, self._plan.steps(config)) as on_step:
            return run_training(
                config,
                folder,
                ranks=self._plan.sweep.ranks,
                environment=self._slot.environment,
                on_step=on_step,
                signum=self._stop_signal,
            )


class SweepProgress:
    """In a terminal, a bar for all runs and one for each training on this machine; everywhere, a
    line for each finished run. Thread-safe."""

    def __init__(self, title: str, runs: int) -> None:
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TextColumn("eta"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            speed_estimate_period=24 * 3600,
        )
        self._all = self._progress.add_task(title, total=runs, unit="runs", status="")

    def __enter__(self) -> SweepProgress:
        self._progress.start()
        return self

    def __exit__(self, *_error: Any) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        now = time.strftime("%H:%M:%S")
        self._console.print(printable(f"{now} {text}"), markup=False, soft_wrap=True)
        sys.stdout.flush()  # also into a log file: a sweep takes long

    def update(self, status: StageStatus) -> None:
        failed = f", {len(status.failed)} failed" if status.failed else ""
        text = f"{len(status.running)} running{failed}"
        self._progress.update(self._all, completed=status.settled, status=text)

    @contextmanager
    def run(self, name: str, steps: int) -> Iterator[Callable[[int], None]]:
        """The bar of one training; yields a function to call with its last step."""
        task = self._progress.add_task(f"  {printable(name)}", total=steps, unit="steps", status="")
        try:
            yield lambda step: self._progress.update(task, completed=step)
        finally:
            self._progress.remove_task(task)
