"""Short trainings in each precision, as CUDA graphs, compiled, and on two GPUs, against the CPU's
loss curve in fp32."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args, get_type_hints

import torch

from fastaug.config import TrainConfig
from fastaug.diagnostics.gpu_report.pictures import shape_folder, small_training
from fastaug.diagnostics.gpu_report.recorder import Recorder, SkippedCheck, needs_real_gpu
from fastaug.engine.trainer import Trainer
from fastaug.runs.config import RunConfig
from fastaug.settings import flag

_STEPS, _QUICK_STEPS = 40, 5
_LAST = 10
"""Steps whose mean loss is compared: single steps drift apart, as rounding errors grow."""
_LINES = 12
_LIMITS = {"fp32": (1e-5, 2e-3)}
_ROUNDED = (2e-3, 1e-2)
"""Largest relative difference of the loss of the first step, and of the mean over the last ones, in
fp32 and in all other precisions. On a CPU, another kernel in fp32 makes 8e-8 and 3e-5, bf16 2e-4
and 4e-4. Products in TF32 are outside of the limits of fp32."""


def training_part(recorder: Recorder) -> None:
    config = _config(recorder)
    _start_table(recorder, "precision", "Training loss on one GPU, and on the CPU in fp32")
    expected = _fit(config, "cpu", device="cpu", kernel="reference")
    _row(recorder, "CPU, fp32", expected, expected)
    runs: dict[str, dict[str, Any]]
    runs = {p: {"precision": p} for p in get_args(get_type_hints(RunConfig)["precision"])}
    runs["fp32, --cuda-graph"] = {"cuda_graph": True}
    if not recorder.quick:
        runs["fp32, --compile"] = {"compile": "default"}
    for name, changes in runs.items():
        with recorder.check(name) as found:
            if "compile" in changes:
                needs_real_gpu("Triton cannot compile for a stand-in")
            if recorder.quick:
                changes["kernel"] = "reference"
            losses = _fit(config, name, device="cuda", **changes)
            _row(recorder, name, losses, expected)
            limits = _LIMITS.get(changes.get("precision", "fp32"), _ROUNDED)
            found.append(_compared(losses, expected, limits))


def two_gpus_part(recorder: Recorder) -> None:
    with recorder.check("torchrun with 2 GPUs") as found:
        if torch.cuda.device_count() < 2:
            raise SkippedCheck("needs two GPUs")
        _start_table(recorder, "GPUs", "Training loss on two GPUs, and on the CPU")
        config = _config(recorder)
        expected = _fit(config, "cpu", device="cpu", kernel="reference")
        _row(recorder, "CPU", expected, expected)
        changes = {"kernel": "reference"} if recorder.quick else {}
        ranks = config.replace(device="cuda", out=f"{config.run.out}-ranks", **changes)
        _torchrun(ranks, 2)
        losses = _losses(Path(ranks.run.out))
        _row(recorder, "2 GPUs, fp32", losses, expected)
        found.append(_compared(losses, expected, _LIMITS["fp32"]))


def _config(recorder: Recorder) -> TrainConfig:
    data = shape_folder(recorder.folder / "shapes", train=4 if recorder.quick else 32, test=2)
    quick = {"size": 16, "batch_size": 16, "views": 2, "max_steps": _QUICK_STEPS}
    changes = quick if recorder.quick else {"max_steps": _STEPS}
    return small_training(data, recorder.folder / "run", **changes)


def _fit(config: TrainConfig, name: str, **changes: Any) -> list[float]:
    """Train in this process; the loss of each step."""
    config = config.replace(out=f"{config.run.out}-{name}", **changes)
    Trainer(config).fit()
    return _losses(Path(config.run.out))


def _losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] in ("train", "partial")]


def _torchrun(config: TrainConfig, ranks: int) -> None:
    defaults = TrainConfig().to_flat()
    settings = {k: v for k, v in config.to_flat().items() if v != defaults[k]}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "fastaug.train"]
    command += [word for name, value in settings.items() for word in (flag(name), str(value))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).rstrip().splitlines()
        errors = [line for line in lines if "error: " in line]  # of fastaug.train: one line each
        last = "\n".join(errors or lines[-_LINES:])
        raise RuntimeError(f"torchrun ended with exit code {done.returncode}:\n{last}")


def _start_table(recorder: Recorder, first: str, title: str) -> None:
    columns = [(first, ""), ("steps", ""), ("loss of the first step", "nats")]
    columns += [("mean of the last steps", "nats"), ("difference at the first step", "%")]
    recorder.table(
        "curves", title, [*columns, ("difference of the last steps", "%"), ("losses", "")]
    )


def _row(recorder: Recorder, name: str, losses: Sequence[float], expected: Sequence[float]) -> None:
    first, last = (100 * off for off in _differences(losses, expected))
    text = " ".join(f"{loss:.4g}" for loss in losses)
    row = (name, len(losses), losses[0], fmean(losses[-_LAST:]), first, last, text)
    recorder.row("curves", *row)


def _differences(losses: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """Relative differences of the first loss, and of the mean over the last ones."""
    ends = fmean(losses[-_LAST:]), fmean(expected[-_LAST:])
    return abs(losses[0] / expected[0] - 1), abs(ends[0] / ends[1] - 1)


def _compared(
    losses: Sequence[float], expected: Sequence[float], limits: tuple[float, float]
) -> str:
    assert len(losses) == len(expected), f"{len(losses)} steps were logged, not {len(expected)}"
    differences = _differences(losses, expected)
    for name, off, limit in zip(("first step", "last steps"), differences, limits, strict=True):
        assert off <= limit, f"{name}: the loss differs by {off:.2%}, more than {limit:.2%}"
    return "the loss differs by {:.2%} at first, {:.2%} at the end".format(*differences)
