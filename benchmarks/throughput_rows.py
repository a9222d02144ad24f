"""From the turns of benchmarks/throughput.py to the rows of its CSV, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import records
from loader_parts import FUSED
from stages import BARE, BOTH, DECODE, FORWARD, LOADER, OBJECTIVE, OPTIMISER, STEP
from timing import quantiles
from turns import Memory, Turn

NAME = "throughput"
SETTINGS = (
    *("device", "data", "model", "classes", "size", "batch_size", "precision"),
    *("loader", "workers", "crop", "interpolation", "antialias"),
    *("randaugment_layers", "randaugment_magnitude"),
)
WHAT = ("part", "contender", "policy", "K", "quantity")
COLUMNS = (
    *records.MACHINE,
    *("dali", "torchvision", "timm", "ffcv", "benchmark"),
    *SETTINGS,
    *WHAT,
    *("median", "p20", "p80", "n", "unit", "status"),
)

LOADERS, STAGES = "loaders", "stages"
TIME, CPU, IMAGES, VIEWS = "time", "cpu time", "images/s", "views/s"
WAIT, HOST, DEVICE = "wait for data", "host memory", "device memory"
MARGINAL = "one more view / one decode"
FASTER = "times fused is faster"
"""Views/s of the fused loader over this one's."""
EXCESS = "step / (bare step + loader's cpu time)"
PARTS_OF_STEP = (FORWARD, "backward", OBJECTIVE, OPTIMISER, WAIT, "other")
"""What a step is made of; the quantity is share of step."""
SHARE = "share of step"

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


def rows(samples: Samples, memory: Mapping[Key, Memory], batch_size: int, cores: int) -> list[Row]:
    """All that was measured and all that follows; samples of one round stand at one place."""
    found: list[Row] = []
    for key, turns in samples.items():
        if not turns:
            continue
        seconds = [turn.seconds for turn in turns]
        found.append(_row(key, TIME, [1e3 * s for s in seconds], "ms"))
        found.append(_row(key, CPU, [1e3 * turn.cpu for turn in turns], "ms"))
        if key.K:
            views = [batch_size / s for s in seconds]
            found.append(_row(key, IMAGES, [v / int(key.K) for v in views], IMAGES))
            found.append(_row(key, VIEWS, views, VIEWS))
        if key.contender == STEP:
            found.append(_row(key, WAIT, [1e3 * turn.wait for turn in turns], "ms"))
        if key in memory:
            found.append(_row(key, HOST, [memory[key].host], "bytes"))
            found.append(_row(key, DEVICE, [memory[key].device], "bytes"))
    return found + _faster(samples) + _marginal(samples, batch_size) + _of_steps(samples, cores)


def failure(key: Key, status: str) -> Row:
    return {**key._asdict(), "quantity": "all", "status": status}


def _row(key: Key, quantity: str, values: Sequence[float], unit: str) -> Row:
    found = quantiles(values)
    numbers = {
        column: round(value) if unit == "bytes" else float(f"{value:.6g}")
        for column, value in zip(("median", "p20", "p80"), found, strict=False)
    }
    row: Row = {**key._asdict(), "quantity": quantity, **numbers}
    return row | {"n": found.n, "unit": unit, "status": "ok"}


def _faster(samples: Samples) -> list[Row]:
    """Of the same round, so that drift cancels."""
    found = []
    for key, turns in samples.items():
        fused = samples.get(key._replace(contender=FUSED), ())
        if key.part == LOADERS and key.contender != FUSED and turns and fused:
            pairs = zip(turns, fused, strict=False)  # an interrupted round may lack one
            values = [turn.seconds / base.seconds for turn, base in pairs]
            found.append(_row(key, FASTER, values, "ratio"))
    return found


def _marginal(samples: Samples, batch_size: int) -> list[Row]:
    """What one more view of an image costs a loader, in decodes by fastaug's."""
    decodes = {key.K: turns for key, turns in samples.items() if key.contender == DECODE}
    found = []
    loaders = {key._replace(K="") for key in samples if key.part == LOADERS}
    for loader in sorted(loaders):
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
        found.append(_row(loader, MARGINAL, values, "decodes"))
    return found


def _of_steps(samples: Samples, cores: int) -> list[Row]:
    """Where the time of a step with the real loader goes, and how far it is from its parts."""
    found = []
    for step in [key for key in samples if key.contender == STEP]:
        parts = {
            FORWARD: Key(STAGES, FORWARD),
            BOTH: Key(STAGES, BOTH),
            OPTIMISER: Key(STAGES, OPTIMISER),
            BARE: Key(STAGES, BARE),
            OBJECTIVE: Key(STAGES, OBJECTIVE, "", step.K),
            LOADER: step._replace(contender=LOADER),
        }
        turns = {name: samples.get(key, ()) for name, key in parts.items()}
        shares: dict[str, list[float]] = {name: [] for name in PARTS_OF_STEP}
        excess = []
        for r in range(min(len(samples[step]), *map(len, turns.values()))):
            whole, now = samples[step][r], {name: taken[r] for name, taken in turns.items()}
            values = {
                FORWARD: now[FORWARD].seconds,
                "backward": now[BOTH].seconds - now[FORWARD].seconds,
                OBJECTIVE: now[OBJECTIVE].seconds,
                OPTIMISER: now[OPTIMISER].seconds,
                WAIT: whole.wait,
            }
            values["other"] = whole.seconds - sum(values.values())
            for name, value in values.items():
                shares[name].append(value / whole.seconds)
            parts_alone = now[BARE].seconds + now[LOADER].cpu / cores
            excess.append(whole.seconds / parts_alone)
        if excess:
            found.append(_row(step, EXCESS, excess, "ratio"))
            found += [
                _row(step._replace(contender=name), SHARE, values, "share")
                for name, values in shares.items()
            ]
    return found
