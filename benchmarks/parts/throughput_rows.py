"""Rows of throughput.csv, computed from the turns of benchmarks/throughput.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parts import results
from parts.loaders import FUSED
from parts.stages import BARE, BOTH, DECODE, FORWARD, LOADER, OBJECTIVE, OPTIMIZER, STEP
from parts.timing import Memory, Turn

NAME = "throughput"
PACKAGES = ("dali", "torchvision", "timm", "ffcv")
SETTINGS = (
    *("device", "data", "model", "classes", "size", "batch_size", "precision"),
    *("loader", "workers", "crop", "interpolation", "antialias"),
    *("randaugment_layers", "randaugment_magnitude"),
)
COLUMNS = (
    *results.MACHINE,
    *PACKAGES,
    "benchmark",
    *SETTINGS,
    *("part", "contender", "policy", "K", "quantity"),
    *("median", "p20", "p80", "n", "unit", "status"),
)

LOADERS, STAGES = "loaders", "stages"
TIME, CPU, IMAGES, VIEWS = "time", "cpu time", "images/s", "views/s"
WAIT, HOST, DEVICE = "wait for data", "host memory", "device memory"
MARGINAL = "one more view / one decode"
FASTER = "times fused is faster"
"""Views/s of the fused loader over those of this one."""
EXCESS = "step / (bare step + loader's cpu time)"
SHARE = "share of step"
PARTS_OF_STEP = (FORWARD, "backward", OBJECTIVE, OPTIMIZER, WAIT, "other")

Row = dict[str, Any]


class Key(NamedTuple):
    """What is measured; policy and K are empty where they make no difference."""

    part: str
    contender: str
    policy: str = ""
    K: int | str = ""

    def __str__(self) -> str:
        name = f"{self.contender}, {self.policy}" if self.policy else self.contender
        return f"{name}, K={self.K}" if self.K else name


Samples = Mapping[Key, Sequence[Turn]]
"""Turns of one round have the same index."""


def make_rows(
    samples: Samples, memory: Mapping[Key, Memory], batch_size: int, cores: int
) -> list[Row]:
    """Measured quantities and those derived from them."""
    rows: list[Row] = []
    for key, turns in samples.items():
        if not turns:
            continue
        seconds = [turn.seconds for turn in turns]
        rows.append(_row(key, TIME, [1e3 * s for s in seconds], "ms"))
        rows.append(_row(key, CPU, [1e3 * turn.cpu for turn in turns], "ms"))
        if key.K:
            views = [batch_size / s for s in seconds]
            rows.append(_row(key, IMAGES, [v / int(key.K) for v in views], IMAGES))
            rows.append(_row(key, VIEWS, views, VIEWS))
        if key.contender == STEP:
            rows.append(_row(key, WAIT, [1e3 * turn.wait for turn in turns], "ms"))
        if key in memory:
            rows.append(_row(key, HOST, [memory[key].host], "bytes"))
            rows.append(_row(key, DEVICE, [memory[key].device], "bytes"))
    return rows + _faster(samples) + _marginal(samples, batch_size) + _steps(samples, cores)


def failure(key: Key, status: str) -> Row:
    return {**key._asdict(), "quantity": "all", "status": status}


def _row(key: Key, quantity: str, values: Sequence[float], unit: str) -> Row:
    return {**key._asdict(), "quantity": quantity, **results.summarize(values, unit)}


def _faster(samples: Samples) -> list[Row]:
    rows = []
    for key, turns in samples.items():
        fused = samples.get(key._replace(contender=FUSED), ())
        if key.part == LOADERS and key.contender != FUSED and turns and fused:
            pairs = zip(turns, fused, strict=False)  # an interrupted round may lack one
            values = [turn.seconds / base.seconds for turn, base in pairs]
            rows.append(_row(key, FASTER, values, "ratio"))
    return rows


def _marginal(samples: Samples, batch_size: int) -> list[Row]:
    """Cost of one more view of an image, in decodes by fastaug's loader."""
    decodes = {key.K: turns for key, turns in samples.items() if key.contender == DECODE}
    rows = []
    for loader in sorted({key._replace(K="") for key in samples if key.part == LOADERS}):
        each = {k: samples.get(loader._replace(K=k), ()) for k in decodes}
        rounds = min((len(turns) for turns in (*each.values(), *decodes.values())), default=0)
        if len(each) < 2 or not rounds:
            continue
        values = []
        for r in range(rounds):
            per_image = {k: turns[r].seconds * k / batch_size for k, turns in each.items()}
            decode = statistics.median(
                turns[r].seconds * k / batch_size for k, turns in decodes.items()
            )
            slope = statistics.linear_regression(list(per_image), list(per_image.values())).slope
            values.append(slope / decode)
        rows.append(_row(loader, MARGINAL, values, "decodes"))
    return rows


def _steps(samples: Samples, cores: int) -> list[Row]:
    """Shares of a step with the real loader, and its time over that of its parts."""
    rows = []
    for step in [key for key in samples if key.contender == STEP]:
        parts = {name: Key(STAGES, name) for name in (FORWARD, BOTH, OPTIMIZER, BARE)}
        parts[OBJECTIVE] = Key(STAGES, OBJECTIVE, "", step.K)
        parts[LOADER] = step._replace(contender=LOADER)
        turns = {name: samples.get(key, ()) for name, key in parts.items()}
        shares: dict[str, list[float]] = {name: [] for name in PARTS_OF_STEP}
        excess = []
        for r in range(min(len(samples[step]), *map(len, turns.values()))):
            whole, now = samples[step][r], {name: taken[r] for name, taken in turns.items()}
            seconds = {
                FORWARD: now[FORWARD].seconds,
                "backward": now[BOTH].seconds - now[FORWARD].seconds,
                OBJECTIVE: now[OBJECTIVE].seconds,
                OPTIMIZER: now[OPTIMIZER].seconds,
                WAIT: whole.wait,
            }
            seconds["other"] = whole.seconds - sum(seconds.values())
            for name, value in seconds.items():
                shares[name].append(value / whole.seconds)
            excess.append(whole.seconds / (now[BARE].seconds + now[LOADER].cpu / cores))
        if excess:
            rows.append(_row(step, EXCESS, excess, "ratio"))
            rows += [
                _row(step._replace(contender=name), SHARE, values, "share")
                for name, values in shares.items()
            ]
    return rows
