"""The run folder's records: config.json, metrics.jsonl, summary.json and TensorBoard events."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.data.images import ImageSet
from fastaug.errors import ConfigError


class Meter:
    """Means of the loss and its terms over the steps since they were last read.

    They are summed on the device, so that a step needs no host sync.
    """

    NAMES = ("loss", "nll", "kl")

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(self.NAMES), device=device)
        self._weight = 0.0

    def add(self, loss: Tensor, nll: Tensor, kl: Tensor, weight: float) -> None:
        """The terms of a part of a step, and its share of the step."""
        terms = torch.stack([loss.detach().float(), nll.float().mean(), kl.float().mean()])
        self._sums.add_(terms, alpha=weight)
        self._weight += weight

    def means(self) -> dict[str, float]:
        """The means so far. Waits for the device."""
        return dict(zip(self.NAMES, (self._sums / self._weight).tolist(), strict=True))

    def read(self) -> dict[str, float]:
        """The means so far; then starts anew."""
        means = self.means()
        self._sums.zero_()
        self._weight = 0.0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums.clone(), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.copy_(state["sums"])
        self._weight = state["weight"]


class Speedometer:
    """Images and views per second of training, without the evaluations between the epochs; and the
    share of the time, 0 to 1, that it waited for the loader."""

    def __init__(self, batch_size: int, views: int) -> None:
        self._batch_size, self._views = batch_size, views
        self._seconds = self._waited = 0.0
        self._steps = 0

    def start(self, step: int) -> None:
        self._since, self._since_step = time.perf_counter(), step
        self._waited_since = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what the training waits for, between start and read."""
        started = time.perf_counter()
        yield
        self._waited_since += time.perf_counter() - started

    def read(self, step: int) -> dict[str, float]:
        """The rates since the last reading."""
        seconds, steps = time.perf_counter() - self._since, step - self._since_step
        waited = self._waited_since
        self._seconds += seconds
        self._waited += waited
        self._steps += steps
        self.start(step)
        return self._rates(steps, seconds, waited)

    def whole_run(self) -> dict[str, float]:
        rates = self._rates(self._steps, self._seconds, self._waited)
        return {"train_seconds": self._seconds, **rates}

    def _rates(self, steps: int, seconds: float, waited: float) -> dict[str, float]:
        views_per_s = steps * self._batch_size / seconds if seconds else 0.0
        return {
            "images_per_s": views_per_s / self._views,
            "views_per_s": views_per_s,
            "wait_for_data": waited / seconds if seconds else 0.0,
        }


class RunFolder:
    """Writes a run's records. Values under "timing" are the machine's, all others the run's."""

    def __init__(self, path: Path, config: TrainConfig, *, resume_step: int | None = None) -> None:
        """resume_step: None for a new run, else the step that the run continues from."""
        from torch.utils.tensorboard import SummaryWriter

        self.path = path
        # A run that ended before its first checkpoint holds nothing to keep.
        if resume_step is None and (path / "last.pt").exists():
            raise ConfigError(
                f"--out {path}: holds a run already; continue it with --resume {path}, "
                "or choose another folder"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / "config.json", config.to_dict())
            self._keep_metrics_until(resume_step or 0)
            self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")
            purge = None if resume_step is None else resume_step + 1
            self._events = SummaryWriter(str(path), purge_step=purge)
        except OSError as error:
            raise ConfigError(
                f"--out {path}: cannot be written ({error.strerror or error})"
            ) from error

    def write(
        self, kind: str, step: int, values: dict[str, float], timing: dict[str, float]
    ) -> None:
        """One record: a line of metrics.jsonl, and a scalar of TensorBoard for each value."""
        record = {"kind": kind, "step": step, **values, "timing": timing}
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        for name, value in (values | timing).items():
            self._events.add_scalar(f"{kind}/{name}", value, step)

    def write_picture(self, name: str, picture: Image) -> None:
        self._events.add_image(name, np.asarray(picture), 0, dataformats="HWC")

    def write_bad_images(self, *sets: ImageSet) -> None:
        """bad-images.txt: a line for each image that the run does without, if there is one."""
        lines = [
            f"{images.where(index)}: {reason}\n"
            for images in sets
            for index, reason in images.bad.items()
        ]
        file = self.path / "bad-images.txt"
        file.unlink(missing_ok=True)
        if lines:
            file.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()

    def _keep_metrics_until(self, step: int) -> None:
        """Drop what a resumed run writes again, what the stop alone wrote, and a torn line."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return
        kept = []
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["step"] <= step and record["kind"] not in ("partial", "final"):
                kept.append(line + "\n")
        file.write_text("".join(kept), encoding="utf-8")


def write_event_picture(folder: Path, name: str, picture: Image) -> None:
    """A picture for TensorBoard alone, outside a run."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as events:
        events.add_image(name, np.asarray(picture), 0, dataformats="HWC")


def write_json(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def environment(device: torch.device) -> dict[str, str]:
    """What the figures of a run were measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "gpu": gpu,
        "cpu_threads": str(torch.get_num_threads()),
    }
