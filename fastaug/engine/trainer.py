"""The trainer: the one path of an image, from the loader to the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.sources import open_source
from fastaug.engine.evaluation import Evaluation
from fastaug.engine.learner import Learner
from fastaug.engine.loaders import build_loader, scan_configured, training_images
from fastaug.engine.metrics import Meter, Speedometer
from fastaug.engine.nonfinite import NonFiniteGuard, NonFiniteStep, Part
from fastaug.engine.optim import learning_rate
from fastaug.engine.profiling import Profiler, steps_to_record
from fastaug.errors import DataError
from fastaug.kernels.registry import find_kernel
from fastaug.runs.checkpoint import check_continuable, load_checkpoint
from fastaug.runs.picture import draw_views
from fastaug.runs.recorder import Recorder
from fastaug.runtime.device import (
    avoid_broken_cpu_arithmetic,
    check_compiler,
    environment,
    keep_freed_memory,
    resolve_device,
)
from fastaug.runtime.distributed import Agreement, Group, lost_rank
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError
from fastaug.runtime.torchrun import launch_name
from fastaug.runtime.trace import named
from fastaug.runtime.watchdog import Watchdog
from fastaug.views.batch import ViewBatch


class Trainer:
    """One run, on one of its ranks. What changes from step to step is in state_dict, and nowhere
    else; it is the same on every rank after every step."""

    def __init__(
        self, config: TrainConfig, checkpoint: Path | None = None, group: Group | None = None
    ) -> None:
        self.config = config
        self.group = group = group or Group()
        self.device = resolve_device(config.run.device)
        avoid_broken_cpu_arithmetic(self.device, config.run.precision)
        keep_freed_memory(self.device)
        if config.run.compile:
            check_compiler(self.device)
        self.train_images, *measured = group.in_turn(lambda: self._image_sets())
        train = self.train_images
        self.evaluations = [Evaluation(i, config, self.device, group) for i in measured]
        """Of the test images, and before them of those that are held out, if any are. The first one
        is made after each epoch, and chooses best.pt."""
        torch.manual_seed(config.run.seed)
        # Here rather than at the first step: a wrong name ends the run before it has begun, and
        # one rank compiles for all.
        logits = torch.empty(1, config.view.views, len(train.classes), device=self.device)
        group.in_turn(lambda: find_kernel(config.loss.kernel, logits))
        self.learner = Learner(config, len(train.classes), self.device, group)
        self.loader = group.in_turn(
            lambda: build_loader(config, train, rank=group.rank, ranks=group.ranks)
        )
        self.steps_per_epoch = len(self.loader) // config.optim.accumulate
        self.total_steps = config.optim.epochs * self.steps_per_epoch
        self.meter = Meter(self.device)
        self.skipped = NonFiniteGuard(
            config.run.max_bad_steps,
            group,
            where=train.where,
            tell=self._tell_of,
            keep=lambda batch: self.recorder.write_bad_batch(batch),
        )
        self.step = 0
        self.evaluated_epochs = 0
        self.best_top1 = -1.0
        self.resumed = checkpoint is not None
        if checkpoint is not None:
            state = group.from_first(lambda: load_checkpoint(checkpoint))
            self.load_state_dict(state, str(checkpoint))
        self.first_step = self.step
        self._boundary = self._state_between_steps()
        self._changing = False
        """Whether the weights are between two steps' just now."""
        self.speed = Speedometer(config.optim.batch_size, config.view.views)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True

    def _image_sets(self) -> list[ImageSet]:
        """To train on, held out (if the config says so), and to test on."""
        train, test = open_source(self.config.data.data)
        train, held_out = training_images(self.config.data, train)
        sets = [train, test] if held_out is None else [train, held_out, test]
        return [scan_configured(self.config.data, images) for images in sets]

    @property
    def last_step(self) -> int:
        """Where this run stops: the end of the schedule, or --max-steps."""
        return min(self.total_steps, self.config.optim.max_steps or self.total_steps)

    def fit(self) -> dict[str, Any]:
        """Train to the end, or until a signal; every step that was made is in last.pt."""
        self.recorder = Recorder(
            self.config,
            self.group,
            steps=self.last_step,
            done=self.step,
            evaluated_epochs=self.evaluated_epochs,
            resumed=self.resumed,
        )
        self.agreement = Agreement(self.group)
        with (
            StopSignals() as self.interrupt,
            self.recorder,
            self._watchdog() as self.watchdog,
            self._profiler() as self.profiler,
        ):
            self.recorder.announce(
                self.train_images,
                [evaluation.image_sets[0] for evaluation in self.evaluations],
                steps_per_epoch=self.steps_per_epoch,
                device=self.device,
            )
            self._list_bad_images()
            self._train()
            return self._finish()

    # --- the loop ---

    def _train(self) -> None:
        try:
            self._evaluate_finished_epoch()
            while self.step < self.last_step:
                self._train_rest_of_epoch()
                self._evaluate_finished_epoch()
        except BaseException as error:
            self._save_before_ending()
            # A signal to the whole process group kills the loader's workers, which is an error of
            # its own before the request is looked at.
            if not isinstance(error, TrainingInterruptedError):
                self.interrupt.check()
            if self.group.ranks > 1 and (lost := lost_rank(error)):
                raise lost from error
            raise
        self.recorder.save(self.state_dict())

    def _train_rest_of_epoch(self) -> None:
        config, share = self.config, 1 / self.config.optim.accumulate
        self.learner.model.train()
        self.speed.start(self.step)
        self.profiler.reach(self.step)
        parts: list[Part] = []
        for batch in self._batches():
            if self.step == 0 and not parts:
                picture = draw_views(self.train_images, batch, config.view)
                self.recorder.write_picture("views", picture)
            if not parts:
                self.learner.start_step(self.step)
            is_last = len(parts) + 1 == config.optim.accumulate
            batch = batch.to(self.device)
            terms = self.learner.backward(batch, share, last=is_last)
            self.meter.add(*terms, weight=share)
            parts.append((batch, terms))
            if not is_last:
                continue
            self._update(parts)
            parts = []
            if self.recorder.is_checkpoint_due(self.step):
                self.recorder.save(self.state_dict())
            self.profiler.reach(self.step)
            if self.step == self.last_step:
                break
            self._end_if_asked()
        self.skipped.look()

    def _update(self, parts: list[Part]) -> None:
        """The end of a step: the weights, and all that is known of the run, move on together."""
        self.skipped.look()  # may end the run, so before anything moves
        self.meter.end_step(self.group)
        rate = learning_rate(
            self.step, self.steps_per_epoch, self.config.optim, self.config.images_per_step
        )
        self._changing = True
        bad = self.learner.update(rate)
        self.step += 1
        self.skipped.add(self.step, bad, parts)
        values = None
        if self.step % self.config.run.log_every == 0 or self.step % self.steps_per_epoch == 0:
            values = self.meter.read()
        self._boundary = self._state_between_steps()
        self._changing = False
        self.recorder.console.advance()
        if values is not None:
            self._log("train", values, rate)
        elif self.step == self.last_step:
            self._log("partial", self.meter.means(), rate)
        self.watchdog.beat("waiting for data")

    def _batches(self) -> Iterator[ViewBatch]:
        """What is left of the epoch, and the time that was waited for it."""
        batches = iter(self.loader)
        while True:
            with named("wait for data"), self.speed.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            alone = self.group.ranks == 1
            self.watchdog.beat("training" if alone else "training, or waiting for another rank")
            yield batch

    def _end_if_asked(self) -> None:
        """A signal that any rank has got ends all of them, after the same step."""
        if signum := self.agreement.largest(self.interrupt.signum):
            raise TrainingInterruptedError(signum)

    def _tell_of(self, bad: NonFiniteStep) -> None:
        # With fp16 a gradient too large for its scale is part of finding it: noted, not said.
        if bad.culprits or self.config.run.precision != "fp16":
            reason = bad.reason(self.train_images.where)
            self.recorder.console.line(f"warning: step {bad.step:,} is skipped: {reason}")
        indices = {"images": bad.images, "culprits": bad.culprits}
        scaler = self.learner.scaler
        scale = {"fp16_scale": scaler.get_scale()} if scaler.is_enabled() else {}
        self.recorder.write("skipped", bad.step, {**indices, **scale}, {})

    # --- evaluation and records ---

    def _evaluate_finished_epoch(self) -> None:
        """After an epoch; on resume also if the run was ended before its evaluation was."""
        epoch, steps_into_next = divmod(self.step, self.steps_per_epoch)
        if steps_into_next or epoch == self.evaluated_epochs:
            return
        due = epoch % self.config.eval.eval_every == 0 or self.step == self.total_steps
        if due and self.step > self.first_step:
            self.recorder.save(self.state_dict())  # an evaluation may take long, and be cut short
        measures = self._timed_evaluation(epoch) if due else {"top1": -1.0}
        self.evaluated_epochs = epoch
        is_best = measures["top1"] > self.best_top1
        self.best_top1 = max(self.best_top1, measures["top1"])
        self.recorder.save(self.state_dict(), best=is_best)
        self._list_bad_images()

    def _timed_evaluation(self, epoch: int) -> dict[str, float]:
        started = time.perf_counter()
        measures = self._measure(self.evaluations[0], self.config.eval.eval_views)
        timing = {"seconds": time.perf_counter() - started}
        self.recorder.write("eval", self.step, {"epoch": epoch, **measures}, timing)
        self.recorder.console.epoch(epoch, self.config.optim.epochs, measures)
        return measures

    def _measure(self, evaluation: Evaluation, views: int) -> dict[str, float]:
        def on_batch(done: int, total: int) -> None:
            self.watchdog.beat("evaluating")
            self._end_if_asked()
            self.recorder.console.evaluating(done, total)

        try:
            return evaluation.measure(self.learner.evaluated_model, views=views, on_batch=on_batch)
        except (RuntimeError, DataError):  # as in _train: workers that a signal has ended
            self.interrupt.check()
            raise

    def _log(self, kind: str, values: dict[str, float], rate: float) -> None:
        timing = self.speed.read(self.step)
        record = {"epoch": self.step / self.steps_per_epoch, **values, "lr": rate}
        record["skipped_steps"] = self.skipped.count
        self.recorder.write(kind, self.step, record, timing)
        self.recorder.console.status(values, timing["views_per_s"])

    def _finish(self) -> dict[str, Any]:
        *held_out, measures = (self._measure(e, self.config.eval.tta) for e in self.evaluations)
        if not self.recorder.has_best:
            self.recorder.save(self.state_dict(), best=True)
        timing = self.speed.whole_run()
        self.recorder.write("final", self.step, measures, timing)
        summary = {
            "finished": self.step == self.total_steps,
            "step": self.step,
            "total_steps": self.total_steps,
            "skipped_steps": self.skipped.count,
            "measures": measures,
            # What settings are chosen by, where images are held out for it.
            **({"validation": held_out[0]} if held_out else {}),
            "best_top1": self.best_top1 if self.best_top1 >= 0 else measures["top1"],
            "parameters": sum(parameter.numel() for parameter in self.learner.model.parameters()),
            "timing": timing,
            "environment": environment(self.device) | {"ranks": str(self.group.ranks)},
        }
        self.recorder.write_summary(summary)
        return summary

    def _list_bad_images(self) -> None:
        measured = [images for e in self.evaluations for images in e.image_sets]
        self.recorder.list_bad_images([self.loader.images, *measured])

    def _profiler(self) -> Profiler:
        steps = None
        if self.config.run.profile and self.group.is_first:
            steps = steps_to_record(self.step, self.last_step, self.steps_per_epoch)
        path = self.recorder.path / "trace.json"
        return Profiler(steps, path, self.device, self.recorder.console.line)

    def _watchdog(self) -> Watchdog:
        rank = f"rank {self.group.rank}" if self.group.ranks > 1 else "the training"
        file = self.recorder.path / "stall.txt" if self.group.is_first else None
        return Watchdog(
            self.config.run.stall_timeout, name=rank, file=file, save=self._save_before_ending
        )

    # --- state ---

    def _save_before_ending(self) -> None:
        """What was trained so far, if that is more than there was: without the other ranks, which
        may be gone, and perhaps from another thread."""
        if self.step > self.first_step and not self._changing and self.group.is_first:
            self.learner.abandon_step()
            self.recorder.save(self.state_dict())
            self.recorder.finish_saving()
            self.recorder.console.saved(self.step, self.total_steps, self.recorder.path)

    def _state_between_steps(self) -> dict[str, Any]:
        """What also changes within a step. Kept from before it, so that a step which breaks off can
        be repeated: its weights have not changed yet."""
        return {"loader": self.loader.state_dict(), "meter": self.meter.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_flat(),
            "classes": list(self.train_images.classes),
            "launch": launch_name(),
            **self.learner.state_dict(),
            "step": self.step,
            "skipped_steps": self.skipped.count,
            "evaluated_epochs": self.evaluated_epochs,
            "best_top1": self.best_top1,
            **self._boundary,
        }

    def load_state_dict(self, state: dict[str, Any], name: str) -> None:
        """Continue from a checkpoint of the same configuration; others are refused."""
        check_continuable(state, self.config, self.train_images.classes, name)
        self.loader.load_state_dict(state["loader"])
        self.learner.load_state_dict(state)
        self.meter.load_state_dict(state["meter"])
        self.skipped.count = state["skipped_steps"]
        self.step = state["step"]
        self.evaluated_epochs = state["evaluated_epochs"]
        self.best_top1 = state["best_top1"]
