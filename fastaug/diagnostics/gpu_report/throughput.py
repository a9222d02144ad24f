"""Images/s of training versus K, with the stages of a step, host waits and peak memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

import fastaug
from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.storage import Files
from fastaug.diagnostics import photos
from fastaug.diagnostics.gpu_report.decode import require_gpu_decoder
from fastaug.diagnostics.gpu_report.pictures import CLASSES as LABELS
from fastaug.diagnostics.gpu_report.pictures import shape_folder
from fastaug.diagnostics.gpu_report.recorder import Recorder
from fastaug.diagnostics.gpu_report.view_checks import render
from fastaug.diagnostics.timing import seconds_of, synchronize
from fastaug.engine.learner import Learner
from fastaug.engine.loaders import build_loader, scan_configured
from fastaug.engine.metrics import Meter
from fastaug.runtime import trace
from fastaug.runtime.arithmetic import set_arithmetic
from fastaug.views.batch import ViewBatch

MODEL, SIZE, CLASSES, PRECISION, BATCH = "nf_resnet50", 224, 1000, "bf16", 256
"""What benchmarks/predict.py predicts by default."""
_SMALLEST_BATCH = 32
STAGES = {"forward": "forward", "objective": "loss", "backward": "backward", "optimizer": "update"}
"""Range of a step (runtime/trace.py) -> column of the table."""
_SETTINGS = (
    *(("model", ""), ("size", "px"), ("classes", ""), ("precision", "")),
    *(("augmentation", ""), ("loader", "")),
)
_COLUMNS = (
    *(("K", ""), ("views in a step", ""), ("images/s", "1/s"), ("views/s", "1/s")),
    *(("step", "ms"), ("wait for data", "ms"), ("loader alone", "images/s")),
    *((name, "ms") for name in ("views", *STAGES.values())),
    ("peak memory", "MB"),
)


class _Effort(NamedTuple):
    """How much is measured."""

    warm_up: int
    """Batches before the measurement."""
    steps: int
    seconds: float
    """For which only the loader runs."""


_FULL, _QUICK = _Effort(3, 10, 2.0), _Effort(1, 1, 0.0)


def throughput_part(recorder: Recorder) -> None:
    size, classes, model = (SIZE, CLASSES, MODEL) if not recorder.quick else (16, 10, "wrn-10-1")
    views, batch = ((1, 2, 4, 8, 16), BATCH) if not recorder.quick else ((1, 2), 2)
    effort = _QUICK if recorder.quick else _FULL
    loader = _loader()
    images = _images(recorder.folder, recorder.quick)
    title = "Decoding: the loader at K=1 and 16 px, where views cost nothing"
    recorder.table("decode", title, [("loader", ""), ("images/s", "1/s")])
    with recorder.check("decoding") as found:
        config = _config(loader, recorder, views=1, size=16, batch_size=batch)
        rate = config.images_per_step * _batches_per_second(config, images, effort)
        recorder.row("decode", loader, rate)
        found.append(f"{rate:,.0f} images/s")
    recorder.table("settings", "Settings of the training", _SETTINGS)
    recorder.row("settings", model, size, classes, PRECISION, "crop-flip", loader)
    recorder.table("throughput", "Training versus K", _COLUMNS)
    for k in views:
        with recorder.check(f"K={k}") as found:
            settings = {"views": k, "size": size, "model": model, "precision": PRECISION}
            row: list[Any] = []
            while not row:
                torch.cuda.empty_cache()
                config = _config(loader, recorder, **settings, batch_size=batch)
                try:
                    row = _measure(config, images, classes, effort)
                except torch.OutOfMemoryError:
                    if batch <= _SMALLEST_BATCH:
                        raise
                    batch //= 2
            recorder.row("throughput", *row)
            found.append(f"{row[2]:,.0f} images/s, {row[3]:,.0f} views/s")


def _loader() -> str:
    """The DALI loader; the torch loader where DALI cannot use the GPU: "decode" reports why."""
    try:
        require_gpu_decoder()
    except Exception:  # DALI or a broken installation may raise anything
        return "torch"
    return "dali"


def _config(loader: str, recorder: Recorder, **settings: Any) -> TrainConfig:
    settings |= {"loader": loader, "device": "cuda"}
    if recorder.quick:
        settings |= {"workers": 0, "prefetch": 1, "kernel": "reference"}
        if loader == "dali":
            settings["views_engine"] = "dali"  # needs no admission check
    return TrainConfig.from_flat(**settings)


def _images(folder: Path, quick: bool) -> ImageSet:
    """Photo-like JPEGs, repeated so that an epoch has enough batches; quick: small drawn shapes."""
    if quick:
        files = sorted(shape_folder(folder / "shapes", train=1).glob("train/*/*.jpg"))
    else:
        files = [folder / f"{number:03}.jpg" for number in range(128)]
        for number, file in enumerate(files):
            photos.save_picture(file, (number,))
    files *= 64
    labels = np.arange(len(files)) % len(LABELS)
    images = ImageSet("pictures", LABELS, labels, Files.of(files))
    return scan_configured(DataConfig(), images)


def _batches_per_second(config: TrainConfig, images: ImageSet, effort: _Effort) -> float:
    """Speed of the loader without training."""
    with closing(_endless(config, images)) as batches:
        for _ in range(effort.warm_up):
            next(batches)
        done, started = 0, time.perf_counter()
        while done < 2 or time.perf_counter() - started < effort.seconds:
            next(batches)
            done += 1
        synchronize(torch.device("cuda"))
        return done / (time.perf_counter() - started)


def _endless(config: TrainConfig, images: ImageSet) -> Generator[ViewBatch]:
    loader = build_loader(config, images)
    while True:
        yield from loader


def _measure(config: TrainConfig, images: ImageSet, classes: int, effort: _Effort) -> list[Any]:
    """A row of the table."""
    device = torch.device("cuda", torch.cuda.current_device())
    set_arithmetic(device, config.run.precision)
    torch.cuda.reset_peak_memory_stats()
    learner = Learner(config, classes, device)
    learner.model.train()
    meter = Meter(device)

    def step(batch: ViewBatch) -> None:
        """The trainer's step, with a learning rate of 0: many steps on few images would overfit."""
        learner.start_step(0)
        meter.add(*learner.backward(batch.to(device)), weight=1.0)
        learner.update(rate=0.0)

    with closing(_endless(config, images)) as batches:
        for _ in range(effort.warm_up):
            step(next(batches))
        per_step, waited = _train(step, batches, effort.steps, device)
        stages = _stages(step, next(batches), effort.steps, device)
    memory = torch.cuda.max_memory_allocated() / 1e6
    alone = config.images_per_step * _batches_per_second(config, images, effort)
    views = config.optim.batch_size
    return [
        *(config.view.views, views, config.images_per_step / per_step, views / per_step),
        *(1e3 * per_step, 1e3 * waited, alone),
        *(1e3 * _view_seconds(config, device), *stages, memory),
    ]


def _train(
    step: Callable[[ViewBatch], None],
    batches: Iterator[ViewBatch],
    steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Seconds of a step with the loader, and those of it that the host waits for the loader."""
    synchronize(device)
    waited, started = 0.0, time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        step(batch)
    synchronize(device)
    return (time.perf_counter() - started) / steps, waited / steps


def _stages(
    step: Callable[[ViewBatch], None], batch: ViewBatch, steps: int, device: torch.device
) -> list[float]:
    """Milliseconds of each stage on the training stream, without a loader."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        ends[0].record()
        yield
        ends[1].record()
        events[name].append(ends)

    trace.trace_with(timed)
    try:
        for _ in range(steps):
            step(batch)
    finally:
        trace.stop_tracing()
    synchronize(device)
    return [median(a.elapsed_time(b) for a, b in events[name]) for name in STAGES]


def _view_seconds(config: TrainConfig, device: torch.device) -> float:
    """Seconds to make the views of a step on the GPU, from decoded images."""
    shape = (375, 500, 3) if config.view.size > 64 else (40, 50, 3)
    image = torch.randint(256, shape, dtype=torch.uint8, device=device)
    images = [image] * config.images_per_step
    plan = fastaug.plan_views(images, views=config.view.views, size=config.view.size)
    render(images, plan)
    loops = 1 if config.view.size <= 64 else 5
    return seconds_of(lambda: render(images, plan), loops, device) / loops
