"""The trainer: batches, steps, evaluation, checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastaug.config import TrainConfig
from fastaug.engine.evaluation import Evaluation
from fastaug.engine.extension import check_new_length
from fastaug.engine.graphed import GraphedLearner
from fastaug.engine.learner import Learner
from fastaug.engine.loaders import build_loader, scanned_sets
from fastaug.engine.metrics import Meter, Speedometer, metric_rows
from fastaug.engine.nonfinite import NonFiniteGuard, NonFiniteStep, Part
from fastaug.engine.optim import learning_rate
from fastaug.engine.optim_report import describe_optimizer
from fastaug.engine.preflight import prepare_device, warning_if_unshared
from fastaug.engine.profiling import Profiler, steps_to_record
from fastaug.engine.rank_check import check_engines, check_settings
from fastaug.engine.rank_data import agree_on_images, bad_images_of_all
from fastaug.engine.rank_drift import DriftCheck
from fastaug.errors import DataError, FastaugError, RankDriftError, first_line
from fastaug.models.pretrained import REPLACED
from fastaug.runs.checkpoint import check_continuable, check_progress, load_checkpoint
from fastaug.runs.console import RunConsole, announcement
from fastaug.runs.folder import RunFolder
from fastaug.runs.initial_weights import read_initial_weights
from fastaug.runs.picture import draw_views
from fastaug.runtime.arithmetic import arithmetic_in_force
from fastaug.runtime.device import environment
from fastaug.runtime.distributed import Agreement, Group
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError
from fastaug.runtime.source_version import source_commit
from fastaug.runtime.torchrun import torchrun_id
from fastaug.runtime.trace import trace_range
from fastaug.runtime.watchdog import Watchdog
from fastaug.views.batch import ViewBatch


class Trainer:
    """One rank of a run. state_dict has everything that changes from step to step; but for the
    measured times it is the same on every rank after every step."""

    def __init__(
        self, config: TrainConfig, checkpoint: Path | None = None, group: Group | None = None
    ) -> None:
        self.config = config
        group = group or Group()
        self._commit = source_commit()  # now: the checkout may have changed when the run ends
        check_settings(group, config)
        self.device = group.in_turn(lambda: prepare_device(config.run))
        self.group = group = group.on(self.device)
        # Read before the images are scanned: a mistake in it ends the run at once.
        self._initial = None
        if checkpoint is None:
            self._initial = group.from_first(lambda: read_initial_weights(config))
        scanned = group.in_turn(lambda: scanned_sets(config.data))
        train, *measured = agree_on_images(group, config.data, scanned).values()
        self.train_images = train
        self.evaluations = [Evaluation(i, config, self.device, group) for i in measured]
        """On the held-out images, if there are any, and on the test images. The first one runs
        after each epoch and chooses best.pt."""
        torch.manual_seed(config.run.seed)
        learner = GraphedLearner if config.run.cuda_graph else Learner
        self.learner = learner(
            config, len(train.classes), self.device, group, self._load_initial_weights
        )
        self.loader = group.in_turn(
            lambda: build_loader(config, train, rank=group.rank, ranks=group.ranks)
        )
        check_engines(group, config, self.learner.kernel, self.loader.engine_name, self.device)
        self.steps_per_epoch = len(self.loader) // config.optim.accumulate
        self.total_steps = config.optim.epochs * self.steps_per_epoch
        self.meter = Meter(self.device)
        self.nonfinite = NonFiniteGuard(
            config.run.max_bad_steps,
            group,
            where=train.where,
            report=self._report_nonfinite,
            views=self._views_of_step,
            keep=lambda batch: self.folder.write_bad_batch(batch),
        )
        self.step = 0
        self.evaluated_epochs = 0
        self.best_top1 = -1.0
        self._view_size = 0
        """Side of the views in the epoch that is trained on."""
        self.speed = Speedometer(config.optim.batch_size, config.view.views)
        self._changes = ""
        """What a resumed run does otherwise than the run that it continues."""
        if checkpoint is not None:
            state = group.from_first(lambda: load_checkpoint(checkpoint))
            self.load_state_dict(state, str(checkpoint))
        self.first_step = self.step
        self.drift = DriftCheck(group, self.device, self.learner.replicated_state, self.step)
        self.speed.start(self.step)
        self._boundary = self._state_between_steps()
        self._updating = threading.Lock()
        """Held while the weights are between those of two steps, and from the last save on."""
        self._resumed_at = None if checkpoint is None else self.step
        self.console = RunConsole(
            self.last_step,
            self.step,
            progress_every=config.run.progress_every,
            quiet=not group.is_first,
        )
        self.folder = RunFolder(
            config,
            say=self.console.line,
            resume_step=self._resumed_at,
            evaluated_epochs=self.evaluated_epochs,
        )
        self.agreement = Agreement(group)
        self.signals = StopSignals()
        self.watchdog = self._watchdog()
        self.profiler = self._profiler()

    def _load_initial_weights(self, model: nn.Module) -> None:
        self._weights_report: list[str] = []
        if self._initial is not None:
            self._weights_report = self._initial.load_into(
                model, self.config.model.model, self.train_images.classes
            )
        self._initial = None  # the network has them now

    @property
    def last_step(self) -> int:
        """Where this run stops: the end of the schedule, or --max-steps."""
        return min(self.total_steps, self.config.optim.max_steps or self.total_steps)

    def fit(self) -> dict[str, Any]:
        """Train to the end, or until a signal; every completed step is in last.pt."""
        self.group.from_first(self._open_folder)
        with self.signals, self.console, self.folder, self.watchdog, self.profiler:
            for line in self.describe():
                self.console.line(line)
            if warning := warning_if_unshared(self.folder.path, self.group):
                self.console.line(warning)
            self._list_bad_images()
            self._train()
            return self._finish()

    def _open_folder(self) -> None:
        self.folder.open()
        if self._changes:
            self.folder.remove_summary()

    def describe(self) -> Iterator[str]:
        """The lines that a run begins with."""
        yield from announcement(
            self.config,
            self.train_images,
            [evaluation.image_sets[0] for evaluation in self.evaluations],
            steps_per_epoch=self.steps_per_epoch,
            last_step=self.last_step,
            device=self.device,
            group=self.group,
        )
        yield from self._weights_report
        head_is_new = any(line.startswith(REPLACED) for line in self._weights_report)
        yield from describe_optimizer(self.learner, head_is_new=head_is_new)
        if self._resumed_at is not None:
            done = "; nothing left to train" if self.step >= self.last_step else ""
            yield f"resumed at step {self._resumed_at:,}{done}"
        if self._changes:
            yield self._changes

    # --- the loop ---

    def _train(self) -> None:
        try:
            self._evaluate_finished_epoch()
            while self.step < self.last_step:
                self._train_rest_of_epoch()
                self._evaluate_finished_epoch()
        except RankDriftError:
            raise  # the last checkpoint is good, and this state may not be
        except BaseException as error:
            self.watchdog.stopping()
            self._save_before_ending()
            # A signal to the whole process group also kills the loader's workers; their error may
            # arrive before the signal is read.
            if not isinstance(error, TrainingInterruptedError):
                self.signals.check()
            raise
        self._save()

    def _train_rest_of_epoch(self) -> None:
        config, share = self.config, 1 / self.config.optim.accumulate
        self._report_size()
        self.learner.model.train()
        self.speed.start(self.step)
        self.profiler.reach(self.step)
        parts: list[Part] = []
        for batch in self._batches():
            if self.step == 0 and not parts:
                picture = draw_views(self.train_images, batch, config.view)
                self.folder.write_picture("views", picture)
            if not parts:
                self.learner.start_step(self.step)
            is_last = len(parts) + 1 == config.optim.accumulate
            terms = self.learner.backward(batch, share, last=is_last)
            self.meter.add(*terms, weight=share)
            parts.append(Part(batch.indices, batch.labels, terms))
            del batch  # its views: with --accumulate, only one part's are in memory
            if not is_last:
                continue
            self._update(parts)
            parts = []
            self.profiler.reach(self.step)
            if self.step == self.last_step:
                break
            self.drift.after_step(self.step)
            self._save_or_stop_if_asked()
        self.nonfinite.check()

    def _update(self, parts: list[Part]) -> None:
        """The end of a step: the weights and all other state advance together."""
        self.nonfinite.check()  # may end the run, so before anything changes
        self.meter.end_step(self.group)
        rate = learning_rate(
            self.step, self.steps_per_epoch, self.config.optim, self.config.images_per_step
        )
        self._updating.acquire()
        bad = self.learner.update(rate)
        self.step += 1
        self.nonfinite.add(self.step, bad, parts)
        values = None
        if self.step % self.config.run.log_every == 0 or self.step % self.steps_per_epoch == 0:
            values = self.meter.read()
        self._boundary = self._state_between_steps()
        self._updating.release()
        self.console.advance()
        if values is not None:
            self._log("train", values, rate)
        elif self.step == self.last_step:
            self._log("partial", self.meter.means(), rate)
        self.watchdog.beat("waiting for data")

    def _report_size(self) -> None:
        """Print the size of growing views when it changes."""
        size, epoch = self.loader.view_size, self.loader.epoch
        if self.config.view.initial_size and size != self._view_size:
            self.console.line(f"epoch {epoch + 1}: views of {size} px")
        self._view_size = size

    def _batches(self) -> Iterator[ViewBatch]:
        """The rest of the epoch; the time spent waiting for it is measured."""
        batches = iter(self.loader)
        while True:
            with trace_range("wait for data"), self.speed.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            waiting = ", or waiting for another rank" if self.group.ranks > 1 else ""
            self.watchdog.beat(f"training{waiting}")
            yield batch
            del batch

    def _save_or_stop_if_asked(self, *, save: bool = True) -> None:
        """Save if it is time to, and end all ranks after the same step if any of them has received
        a signal."""
        signum, is_time = self.agreement.largest(
            self.signals.signum, save and self.folder.is_checkpoint_time
        )
        every = self.config.run.checkpoint_every
        if save and (is_time or (every and self.step % every == 0)):
            self._save()
        if signum:
            self.drift.check_now(self.step)
            raise TrainingInterruptedError(signum)

    def _report_nonfinite(self, skipped: NonFiniteStep) -> None:
        # With fp16 an overflowing gradient is how its scale is found: logged, not shown.
        if skipped.culprits or self.config.run.precision != "fp16":
            reason = skipped.reason(self.train_images.where)
            self.console.line(f"warning: skipped step {skipped.step:,}: {reason}")
        indices = {"images": skipped.images, "culprits": skipped.culprits}
        scaler = self.learner.scaler
        scale = {"fp16_scale": scaler.get_scale()} if scaler.is_enabled() else {}
        self.folder.write("skipped", skipped.step, {**indices, **scale}, {})

    def _views_of_step(self, step: int, images: Tensor) -> Tensor | None:
        """The views of some images of a step, made again by a new loader: this one is in use. None
        if they cannot be made; the run ends anyway, with another error."""
        epoch = (step - 1) // self.steps_per_epoch
        try:
            loader = build_loader(
                self.config, self.loader.images, rank=self.group.rank, ranks=self.group.ranks
            )
            return loader.make_views(epoch, images.numpy()).cpu()
        except (FastaugError, RuntimeError, OSError) as error:
            self.console.line(f"bad-batch.pt has no views: {first_line(error)}")
            return None

    # --- evaluation and logging ---

    def _evaluate_finished_epoch(self) -> None:
        """Evaluate after an epoch; on resume also if the run ended before its evaluation did."""
        epoch, steps_into_next = divmod(self.step, self.steps_per_epoch)
        if steps_into_next or epoch == self.evaluated_epochs:
            return
        due = epoch % self.config.eval.eval_every == 0 or self.step == self.total_steps
        if due and self.step > self.first_step:
            self._save()  # an evaluation may take long, and be interrupted
        measures = self._timed_evaluation(epoch) if due else {"top1": -1.0}
        self.evaluated_epochs = epoch
        is_best = measures["top1"] > self.best_top1
        self.best_top1 = max(self.best_top1, measures["top1"])
        self._save(best=is_best)
        self._list_bad_images()

    def _timed_evaluation(self, epoch: int) -> dict[str, float]:
        started = time.perf_counter()
        measures = self._measure(self.evaluations[0], self.config.eval.eval_views)
        timing = {"seconds": time.perf_counter() - started}
        self.folder.write("eval", self.step, {"epoch": epoch, **measures}, timing)
        self.console.epoch(epoch, self.config.optim.epochs, measures)
        return measures

    def _measure(self, evaluation: Evaluation, views: int) -> dict[str, float]:
        def on_batch(done: int, total: int) -> None:
            self.watchdog.beat("evaluating")
            self._save_or_stop_if_asked(save=False)
            self.console.evaluating(done, total)

        try:
            return evaluation.measure(self.learner.evaluated_model, views=views, on_batch=on_batch)
        except (RuntimeError, DataError):  # as in _train: a signal may have killed the workers
            self.signals.check()
            raise

    def _log(self, kind: str, values: dict[str, float], rate: float) -> None:
        timing = self.speed.read(self.step)
        record = {"epoch": self.step / self.steps_per_epoch, **values, "lr": rate}
        record["skipped_steps"] = self.nonfinite.count
        if self.config.view.initial_size:
            record["size"] = self._view_size
        self.folder.write(kind, self.step, record, timing)
        self.console.status(values, timing)

    def _finish(self) -> dict[str, Any]:
        *held_out, measures = (self._measure(e, self.config.eval.tta) for e in self.evaluations)
        if not self.folder.has_best:
            self.folder.save(self.state_dict(), best=True)
        timing = self.speed.whole_run()
        used = arithmetic_in_force(self.device, self.config.run.precision)
        self.folder.write("final", self.step, measures, timing)
        summary = {
            "finished": self.step == self.total_steps,
            "step": self.step,
            "total_steps": self.total_steps,
            "skipped_steps": self.nonfinite.count,
            "measures": measures,
            # Settings are chosen by these, if images are held out.
            **({"validation": held_out[0]} if held_out else {}),
            # A run that stops in its first epoch has no best epoch.
            "best_top1": self.best_top1
            if self.best_top1 >= 0
            else (*held_out, measures)[0]["top1"],
            "parameters": sum(parameter.numel() for parameter in self.learner.model.parameters()),
            "timing": timing,
            "environment": environment(self.device)
            | {"ranks": str(self.group.ranks), "precision": used, "commit": self._commit},
        }
        self.folder.write_summary(summary)
        self.console.summary(self.config, summary, metric_rows)
        return summary

    def _list_bad_images(self) -> None:
        """Write the images that any rank found unreadable to bad-images.txt."""
        measured = [images for e in self.evaluations for images in e.image_sets]
        known = bad_images_of_all(self.group, [self.loader.images, *measured])
        self.folder.write_bad_images([f"{where}: {reason}" for where, reason in known.items()])

    def _profiler(self) -> Profiler:
        steps = None
        if self.config.run.profile and self.group.is_first:
            steps = steps_to_record(self.step, self.last_step, self.steps_per_epoch)
        path = self.folder.path / "trace.json"
        return Profiler(steps, path, self.device, self.console.line)

    def _watchdog(self) -> Watchdog:
        rank = f"rank {self.group.rank}" if self.group.ranks > 1 else "the training"
        file = self.folder.path / "stall.txt" if self.group.is_first else None
        return Watchdog(
            self.config.run.stall_timeout,
            name=rank,
            file=file,
            save=self._save_before_ending,
            signal_received=self.signals.arrived,
        )

    # --- state ---

    def _save(self, *, best: bool = False) -> None:
        """Save the state, which all ranks have agreed on. Call it on every rank."""
        self.drift.check_now(self.step)
        if self.group.is_first:
            self.folder.save(self.state_dict(), best=best)

    def _save_before_ending(self) -> None:
        """Save the steps of this run so far, without the other ranks, which may be gone; may be
        called from another thread."""
        if self.step == self.first_step or not self.group.is_first:
            return
        # Not released: the training must not continue while another thread copies the weights.
        if self._updating.acquire(blocking=False):
            self.learner.abandon_step()
            self.folder.save(self.state_dict())
            self.folder.finish_saving()
            self.console.saved(self.step, self.total_steps, self.folder.path)

    def _state_between_steps(self) -> dict[str, Any]:
        """State that also changes within a step. Kept from before the step, so that an interrupted
        step can be repeated: its weights have not changed yet."""
        return {
            "loader": self.loader.state_dict(),
            "meter": self.meter.state_dict(),
            "speed": self.speed.state_dict(self.step),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_flat(),
            "classes": list(self.train_images.classes),
            "launch": torchrun_id(),
            **self.learner.state_dict(),
            "step": self.step,
            "skipped_steps": self.nonfinite.count,
            "evaluated_epochs": self.evaluated_epochs,
            "best_top1": self.best_top1,
            **self._boundary,
        }

    def load_state_dict(self, state: dict[str, Any], name: str) -> None:
        """Continue from a checkpoint of the same configuration; refuse others."""
        check_continuable(state, self.config, self.train_images.classes, name)
        saved = TrainConfig.from_saved(state["config"])
        if saved.optim.epochs != self.config.optim.epochs:
            self._changes = check_new_length(
                saved, self.config, state["step"], self.steps_per_epoch, name
            )
        self.loader.load_state_dict(state["loader"])
        check_progress(state, len(self.loader), self.config.optim.accumulate, name)
        self.learner.load_state_dict(state)
        self.meter.load_state_dict(state["meter"])
        if "speed" in state:  # older checkpoints have none
            self.speed.load_state_dict(state["speed"])
        self.nonfinite.count = state["skipped_steps"]
        self.step = state["step"]
        self.evaluated_epochs = state["evaluated_epochs"]
        self.best_top1 = state["best_top1"]
