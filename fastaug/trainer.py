"""The trainer: the one path of an image, from the loader to the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastaug.batch import ViewBatch
from fastaug.checkpoint import load_checkpoint, save_checkpoint
from fastaug.config import TrainConfig
from fastaug.console import RunConsole
from fastaug.data.sources import open_source
from fastaug.device import (
    avoid_broken_cpu_arithmetic,
    check_compiler,
    keep_freed_memory,
    resolve_device,
)
from fastaug.errors import CheckpointError
from fastaug.evaluation import Evaluation
from fastaug.interrupt import Interrupted, InterruptRequest
from fastaug.kernels import find_kernel
from fastaug.learner import Learner
from fastaug.loaders import build_loader, survey_images
from fastaug.optim import learning_rate
from fastaug.picture import draw_views
from fastaug.profiler import Profiler, steps_to_record
from fastaug.ranges import named
from fastaug.telemetry import Meter, RunFolder, Speedometer, environment


class Trainer:
    """One run. What changes from step to step is in state_dict, and nowhere else."""

    def __init__(self, config: TrainConfig, checkpoint: Path | None = None) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        avoid_broken_cpu_arithmetic(self.device, config.precision)
        keep_freed_memory(self.device)
        if config.compile:
            check_compiler(self.device)
        self.train_images, self.test_images = (
            survey_images(config, images) for images in open_source(config.data)
        )
        self._image_sets = self.train_images, self.test_images
        self.evaluation = Evaluation(self.test_images, config, self.device)
        torch.manual_seed(config.seed)
        classes = len(self.train_images.classes)
        # Here rather than at the first step: a wrong name ends the run before it has begun.
        find_kernel(config.kernel, torch.empty(1, config.views, classes, device=self.device))
        self.learner = Learner(config, classes, self.device)
        self.loader = build_loader(config, self.train_images)
        self.steps_per_epoch = len(self.loader) // config.accumulate
        self.total_steps = config.epochs * self.steps_per_epoch
        self.meter = Meter(self.device)
        self.step = 0
        self.evaluated_epochs = 0
        self.best_top1 = -1.0
        self.resumed = checkpoint is not None
        if checkpoint is not None:
            self.load_state_dict(load_checkpoint(checkpoint), str(checkpoint))
        self.first_step = self.step
        self._boundary = self._state_between_steps()
        self.speed = Speedometer(config.batch_size, config.views)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True

    @property
    def last_step(self) -> int:
        """Where this run stops: the end of the schedule, or --max-steps."""
        return min(self.total_steps, self.config.max_steps or self.total_steps)

    def fit(self) -> dict[str, Any]:
        """Train to the end, or until a signal; every step that was made is in last.pt."""
        path = Path(self.config.out)
        self.folder = RunFolder(path, self.config, resume_step=self.step if self.resumed else None)
        self.console = RunConsole(self.last_step, self.step)
        try:
            self.folder.write_bad_images(*self._image_sets)
            with (
                InterruptRequest() as self.interrupt,
                self.console,
                self._profiler() as self.profiler,
            ):
                self._announce()
                self._train()
                return self._finish()
        finally:
            self.folder.close()

    # --- the loop ---

    def _train(self) -> None:
        try:
            self._evaluate_finished_epoch()
            while self.step < self.last_step:
                self._train_rest_of_epoch()
                self._evaluate_finished_epoch()
        except BaseException as error:
            if self.step > self.first_step:
                self._save("last.pt")
                self.console.saved(self.step, self.total_steps, self.folder.path)
            # A signal to the whole process group kills the loader's workers, which is an error of
            # its own before the request is looked at.
            if not isinstance(error, Interrupted):
                self.interrupt.check()
            raise
        self._save("last.pt")

    def _train_rest_of_epoch(self) -> None:
        config = self.config
        self.learner.model.train()
        self.speed.start(self.step)
        part = 0
        self.profiler.reach(self.step)
        for batch in self._batches():
            if self.step == 0 and part == 0:
                picture = draw_views(self.train_images, batch, config)
                self.folder.write_picture("views", picture)
            share = 1 / config.accumulate
            terms = self.learner.backward(batch.to(self.device), share)
            self.meter.add(*terms, weight=share)
            part += 1
            if part < config.accumulate:
                continue
            part = 0
            self.learner.update(learning_rate(self.step, self.steps_per_epoch, config))
            self.step += 1
            self.console.advance()
            if self.step % config.log_every == 0 or self.step % self.steps_per_epoch == 0:
                self._log("train", self.meter.read())
            elif self.step == self.last_step:
                self._log("partial", self.meter.means())
            self._boundary = self._state_between_steps()
            if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                self._save("last.pt")
            self.profiler.reach(self.step)
            if self.step == self.last_step:
                return
            self.interrupt.check()

    def _batches(self) -> Iterator[ViewBatch]:
        """What is left of the epoch, and the time that was waited for it."""
        batches = iter(self.loader)
        while True:
            with named("wait for data"), self.speed.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _profiler(self) -> Profiler:
        steps = None
        if self.config.profile:
            steps = steps_to_record(self.step, self.last_step, self.steps_per_epoch)
        path = self.folder.path / "trace.json"
        return Profiler(steps, path, self.device, self.console.line)

    # --- evaluation and records ---

    def _evaluate_finished_epoch(self) -> None:
        """After an epoch; on resume also if the run was ended before its evaluation was."""
        epoch, steps_into_next = divmod(self.step, self.steps_per_epoch)
        if steps_into_next or epoch == self.evaluated_epochs:
            return
        due = epoch % self.config.eval_every == 0 or self.step == self.total_steps
        measures = self._timed_evaluation(epoch) if due else {"top1": -1.0}
        self.evaluated_epochs = epoch
        if measures["top1"] > self.best_top1:
            self.best_top1 = measures["top1"]
            self._save("best.pt")
        self._save("last.pt")

    def _timed_evaluation(self, epoch: int) -> dict[str, float]:
        started = time.perf_counter()
        measures = self._measure(self.config.eval_views)
        timing = {"seconds": time.perf_counter() - started}
        self.folder.write("eval", self.step, {"epoch": epoch, **measures}, timing)
        self.console.epoch(epoch, self.config.epochs, measures)
        return measures

    def _measure(self, views: int) -> dict[str, float]:
        def on_batch(done: int, total: int) -> None:
            self.interrupt.check()
            self.console.evaluating(done, total)

        try:
            return self.evaluation.measure(
                self.learner.evaluated_model, views=views, on_batch=on_batch
            )
        except RuntimeError:  # as in _train: workers that a signal has ended
            self.interrupt.check()
            raise

    def _log(self, kind: str, values: dict[str, float]) -> None:
        timing = self.speed.read(self.step)
        rate = learning_rate(self.step - 1, self.steps_per_epoch, self.config)
        record = {"epoch": self.step / self.steps_per_epoch, **values, "lr": rate}
        self.folder.write(kind, self.step, record, timing)
        self.console.status(values, timing["views_per_s"])

    def _finish(self) -> dict[str, Any]:
        measures = self._measure(self.config.tta)
        if not (self.folder.path / "best.pt").exists():
            self._save("best.pt")
        timing = self.speed.whole_run()
        self.folder.write("final", self.step, measures, timing)
        summary = {
            "finished": self.step == self.total_steps,
            "step": self.step,
            "total_steps": self.total_steps,
            "measures": measures,
            "best_top1": self.best_top1 if self.best_top1 >= 0 else measures["top1"],
            "parameters": sum(parameter.numel() for parameter in self.learner.model.parameters()),
            "timing": timing,
            "environment": environment(self.device),
        }
        self.folder.write_summary(summary)
        self.console.summary(self.config, summary)
        return summary

    def _announce(self) -> None:
        config, say = self.config, self.console.line
        train, test = (len(images) - len(images.bad) for images in self._image_sets)
        say(
            f"{config.model} on {config.data}: {train:,} training and {test:,} test images, "
            f"{len(self.train_images.classes)} classes, {config.size} px"
        )
        if bad := len(self.train_images.bad):
            say(f"in the place of {bad} bad training images come others, drawn in every epoch")
        say(
            f"{self.total_steps:,} steps of {config.images_per_step} images x {config.views} views "
            f"on {self.device}, {config.precision}, {config.loader} loader; "
            f"run folder {self.folder.path}"
        )
        left_over = len(self.train_images) - self.steps_per_epoch * config.images_per_step
        if left_over > 0:
            say(f"an epoch has whole steps: it leaves out {left_over} images, others each time")
        if left_over < 0:
            say(f"an epoch has whole steps: the last one repeats {-left_over} of its images")
        if config.augment == "none" and config.views > 1:
            say("all views of an image are the same with --augment none; --views 1 costs less")
        if config.randaugment_policy != "nfnet" and config.augment != "randaugment":
            say("--randaugment-policy has no effect without --augment randaugment")
        if self.resumed:
            say(f"resumed at step {self.step:,}")

    # --- state ---

    def _save(self, name: str) -> None:
        save_checkpoint(self.folder.path / name, self.state_dict())

    def _state_between_steps(self) -> dict[str, Any]:
        """What also changes within a step. Kept from before it, so that a step which breaks off can
        be repeated: its weights have not changed yet (batch norm's running means may have)."""
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {
            "loader": self.loader.state_dict(),
            "meter": self.meter.state_dict(),
            "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "classes": list(self.train_images.classes),
            **self.learner.state_dict(),
            "step": self.step,
            "evaluated_epochs": self.evaluated_epochs,
            "best_top1": self.best_top1,
            **self._boundary,
        }

    def load_state_dict(self, state: dict[str, Any], name: str) -> None:
        """Continue from a checkpoint of the same configuration; others are refused."""
        saved = TrainConfig.from_dict(state["config"])
        if differing := saved.differences(self.config):
            raise CheckpointError(
                f"{name} cannot be continued with other settings; it has {', '.join(differing)}"
            )
        if list(self.train_images.classes) != state["classes"]:
            raise CheckpointError(
                f"{name} was trained on other classes than {self.config.data} has"
            )
        self.loader.load_state_dict(state["loader"])
        self.learner.load_state_dict(state)
        self.meter.load_state_dict(state["meter"])
        self.step = state["step"]
        self.evaluated_epochs = state["evaluated_epochs"]
        self.best_top1 = state["best_top1"]
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda" and state["random"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
