"""What chaos.py demands of a disturbed run: that nothing of it differs from an undisturbed one."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from chaos_scene import checksum
from safetensors import safe_open
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

RECORDS = ("train", "eval", "final", "skipped")
_OWN = ("out", "resume", "checkpoint_every", "keep_checkpoints", "workers")
"""Settings that differ from run to run, and may."""
_FILES = ("config.json", "metrics.jsonl", "summary.json", "last.pt", "best.pt", "best.safetensors")

Notes = Iterable[dict[str, Any]]


# --- the run folder ---


def compare(run: Path, other: Path, *, damaged: Collection[str] = ()) -> list[str]:
    """How a run's folder differs from an undisturbed one's; nothing, if all is well.

    damaged: checksums of files that were damaged on purpose, and may lie there still.
    """
    problems = [*_strangers(run), *_unreadable(run, damaged)]
    for name in ("last.pt", "best.pt"):
        if (run / name).exists() and not problems:
            problems += _differences(_state(run / name), _state(other / name), name)
    name = "best.safetensors"
    if not problems:
        problems += _differences(_tensors(run / name), _tensors(other / name), name)
    if not problems:
        problems += _differing_records(_records(run), _records(other))
        problems += _differences(_summary(run), _summary(other), "summary.json")
    return problems


def _strangers(run: Path) -> Iterator[str]:
    """Files that are missing, and files that should not be there."""
    for name in _FILES:
        if not (run / name).is_file():
            yield f"{name} is missing"
    for path in sorted(run.rglob("*")):
        place = path.relative_to(run)
        known = str(place) in _FILES or path.suffix == ".damaged"
        # The picture of the first views may be lost to a full disk, as TensorBoard's events may.
        known = known or str(place) in ("views.png", "stall.txt")
        known = known or place.name.startswith("events.out.tfevents.")
        known = known or place.match("checkpoints/step-*.pt") or str(place) == "checkpoints"
        if not known:
            yield f"{place} should not be there"


def _unreadable(run: Path, damaged: Collection[str]) -> Iterator[str]:
    for path in sorted(run.rglob("*")):
        if not path.is_file() or checksum(path) in damaged:
            continue
        try:
            if path.suffix in (".pt", ".damaged"):
                torch.load(path, weights_only=True)
                if path.suffix == ".damaged":
                    yield f"{path.name} is whole"
            elif path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".safetensors":
                _tensors(path)
            elif "tfevents" in path.name:
                list(RawEventFileLoader(str(path)).Load())
        except Exception as error:
            yield f"{path.relative_to(run)} cannot be read ({error})"


def _state(path: Path) -> dict[str, Any]:
    state = torch.load(path, weights_only=True)
    state["config"] = {name: v for name, v in state["config"].items() if name not in _OWN}
    del state["launch"]  # a name of torchrun's own
    del state["speed"]["seconds"], state["speed"]["waited"]  # as the machine's speed has it
    return state


def _tensors(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        said = {name: v for name, v in sorted(file.metadata().items()) if name != "config"}
        return said | {name: file.get_tensor(name) for name in sorted(file.keys())}


def _summary(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    del summary["timing"]
    return summary


def _records(run: Path) -> list[dict[str, Any]]:
    """What is in metrics.jsonl but for the machine's own figures."""
    records = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = {"kind": f"no JSON: {line[:60]}", "step": -1}
        record.pop("timing", None)
        records.append(record)
    return records


def _differing_records(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> list[str]:
    if strange := [r for r in here if r["kind"] not in RECORDS]:
        return [f"metrics.jsonl: {strange[0]}"]
    names = [[(r["kind"], r["step"]) for r in records] for records in (here, there)]
    if names[0] != names[1]:
        doubled = sorted({name for name in names[0] if names[0].count(name) > 1})
        missing = sorted(set(names[1]) - set(names[0]))
        extra = sorted(set(names[0]) - set(names[1]))
        what = {"doubled": doubled, "missing": missing, "extra": extra}
        said = ", ".join(f"{why} {which[:4]}" for why, which in what.items() if which)
        return [f"metrics.jsonl: records {said or 'in another order'}"]
    return [
        f"metrics.jsonl: {record}, undisturbed {other}"
        for record, other in zip(here, there, strict=True)
        if record != other
    ][:1]


def _differences(here: Any, there: Any, name: str) -> Iterator[str]:
    """To the last bit."""
    if type(here) is not type(there):
        yield f"{name}: {type(here).__name__}, undisturbed {type(there).__name__}"
    elif isinstance(here, dict):
        if list(here) != list(there):
            yield f"{name}: has {list(here)}, undisturbed {list(there)}"
            return
        for key in here:
            yield from _differences(here[key], there[key], f"{name} {key}")
    elif isinstance(here, (list, tuple)):
        if len(here) != len(there):
            yield f"{name}: {len(here)} items, undisturbed {len(there)}"
            return
        for place, (one, other) in enumerate(zip(here, there, strict=True)):
            yield from _differences(one, other, f"{name} {place}")
    elif isinstance(here, torch.Tensor):
        same = here.shape == there.shape and here.dtype == there.dtype
        if not same or here.numpy().tobytes() != there.numpy().tobytes():
            yield f"{name}: other numbers"
    elif here != there and not (isinstance(here, float) and math.isnan(here) and math.isnan(there)):
        yield f"{name}: {here!r}, undisturbed {there!r}"


# --- what was trained on ---


def account(journal: Notes, undisturbed: Notes) -> list[str]:
    """What is wrong with the images that the processes trained on, step by step."""
    expected = _parts(undisturbed)
    lives = list(_lives(journal))
    problems: list[str] = []
    reached: dict[int, int] = {}
    for pid, rank, bounds, steps in lives:
        who = f"rank {rank}, process {pid}"
        numbers = list(steps)
        first, last = numbers[0], numbers[-1]
        least, most = bounds
        if numbers != list(range(first, last + 1)):
            problems.append(f"{who}: steps {numbers} are not one after another")
        if first > reached.get(rank, 0):
            problems.append(f"{who}: begins with step {first}, and {reached.get(rank, 0)} is next")
        if first < least or first > (first if most is None else most):
            problems.append(f"{who}: begins with step {first}, saved was {least}")
        for step, parts in steps.items():
            whole = expected.get((rank, step), [])
            cut = whole[: len(parts)] if step == last else whole
            if not whole or parts != cut:
                problems.append(f"{who}: step {step} has images {parts}, undisturbed {whole}")
        done = last + (steps[last] == expected.get((rank, last)))
        reached[rank] = max(done, reached.get(rank, 0)) if first < done else reached.get(rank, 0)
    for rank in sorted({rank for rank, _ in expected}):
        end = 1 + max(step for one, step in expected if one == rank)
        if reached.get(rank, 0) != end:
            problems.append(f"rank {rank}: has made {reached.get(rank, 0)} of {end} steps")
    return problems


def whole_epochs(journal: Notes, *, steps: int, images: int) -> list[str]:
    """What is wrong with an undisturbed run: an image comes once in an epoch, over all ranks."""
    epochs: dict[int, list[int]] = defaultdict(list)
    for (_, step), parts in _parts(journal).items():
        epochs[step // steps] += [index for part in parts for index in part]
    return [
        f"epoch {epoch}: {len(seen)} images, {len(set(seen))} different ones"
        for epoch, seen in epochs.items()
        if len(seen) != images or len(set(seen)) != images
    ]


def _parts(journal: Notes) -> dict[tuple[int, int], list[list[int]]]:
    """(rank, step) -> the images of its parts."""
    parts: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for note in journal:
        if "step" in note:
            parts[note["rank"], note["step"]].append(note["indices"])
    return dict(parts)


Life = tuple[int, int, tuple[int, int | None], dict[int, list[list[int]]]]


def _lives(journal: Notes) -> Iterator[Life]:
    """(pid, rank, bounds of its first step, step -> parts) of each process that trained, in the
    order of their starts."""
    bounds: tuple[int, int | None] = (0, 0)
    lives: dict[int, Life] = {}
    for note in journal:
        if "least" in note:
            bounds = note["least"], note["most"]
        elif "started" in note:
            lives[note["pid"]] = (note["pid"], note["rank"], bounds, {})
        elif "step" in note:
            lives[note["pid"]][3].setdefault(note["step"], []).append(note["indices"])
    yield from (life for life in lives.values() if life[3])
