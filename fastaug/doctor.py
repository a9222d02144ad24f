"""python -m fastaug.doctor: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

import fastaug
from fastaug import cli
from fastaug.diagnostics import installed, machine
from fastaug.diagnostics.machine import Fact, one_line
from fastaug.errors import ConfigError, KernelUnavailableError
from fastaug.kernels.contract import Kernel
from fastaug.kernels.registry import find_kernel, load_kernel
from fastaug.runs.console import show_table
from fastaug.runtime.atomic import write_json
from fastaug.runtime.device import cpp_compiler, resolve_device
from fastaug.views.admission import compare
from fastaug.views.engine import engine_of

# What is timed: large enough that it is not all overhead, small enough for any machine.
_IMAGES, _VIEWS, _CLASSES = 32, 8, 1000
_ROUNDS, _FEWEST_ROUNDS, _CALLS, _SECONDS = 9, 3, 3, 2.0
# The kernels of fastaug that are meant for such a device, besides the reference.
_HOME = {"cpu": ("native",), "cuda": ("cuda", "triton")}


@dataclass(frozen=True)
class KernelLine:
    """What is found of a loss kernel on a device."""

    kernel: str
    device: str
    ours: bool
    why_not: str | None = None
    """Why it is not available; then it is not checked."""
    admitted: bool | None = None
    cases: int = 0
    worst: str = ""
    milliseconds: float | None = None
    """Of value and gradient at B=32, K=8, C=1000 fp32."""
    speed: float | None = None
    """In multiples of the reference's."""


@dataclass(frozen=True)
class DoctorConfig:
    """Say what works on this machine, and what to do about the rest."""

    device: str = "all"
    """Where kernels and pipelines are tried: all, cpu, cuda, or cuda:N."""
    quick: bool = False
    """Leave out how fast the kernels are."""
    json: str = ""
    """Write what was found to this JSON file too."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    options = cli.parse(DoctorConfig, args, prog="python -m fastaug.doctor")
    out = cli.output_file("--json", options.json) if options.json else None
    with _quiet():
        found, facts = examine(find_devices(options.device), timed=not options.quick)
    todo = sorted((fact for fact in facts if fact.todo), key=lambda fact: not fact.failed)
    show_todo(todo)
    if out is not None:
        found["todo"] = [{"what": fact.todo, "failed": fact.failed} for fact in todo]
        try:
            write_json(out, found)
        except OSError as error:
            raise ConfigError(f"--json {out}: cannot be written ({error.strerror})") from error
    return int(any(fact.failed for fact in facts))


def find_devices(name: str) -> list[torch.device]:
    if name != "all":
        return [resolve_device(name)]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]


def examine(devices: Sequence[torch.device], *, timed: bool) -> tuple[dict[str, Any], list[Fact]]:
    """All that is found, as plain values and as facts; each table is shown when it is done."""
    found: dict[str, Any] = {}
    facts: list[Fact] = []
    for title, probes in (
        ("versions", installed.versions(devices)),
        ("machine", machine.hardware()),
    ):
        group = [fact for name, probe in probes.items() for fact in machine.look(name, probe)]
        found[title] = {fact.name: fact.value for fact in group}
        facts += show(title, group)
    found["kernels"], found["auto"], found["views"] = [], {}, {}
    for device in devices:
        lines, group = look_at_kernels(device, timed=timed)
        auto = machine.look("auto", partial(_automatic, device))
        found["kernels"] += map(asdict, lines)
        found["auto"][str(device)] = auto[0].value
        facts += show(f"loss kernels on {device}", [*group, *auto])
        group = machine.look("fused", partial(look_at_views, device, timed=timed))
        found["views"][str(device)] = {fact.name: fact.value for fact in group}
        facts += show(f"view engines on {device}", group)
    return found, facts


def show(title: str, facts: list[Fact]) -> list[Fact]:
    show_table(title, [(fact.name, fact.value) for fact in facts])
    return facts


def show_todo(todo: Sequence[Fact]) -> None:
    print("To do" if todo else "nothing to do")
    for number, fact in enumerate(todo, start=1):
        print(f"{number}. {'problem: ' if fact.failed else ''}{fact.todo}")


# --- kernels ---


def look_at_kernels(device: torch.device, *, timed: bool) -> tuple[list[KernelLine], list[Fact]]:
    """Those of fastaug, the registered ones, and those that other distributions offer."""
    lines: list[KernelLine] = []
    trouble: list[Fact] = []
    try:
        known = fastaug.available_kernels(torch.empty(1, 2, 2, device=device))
        lines = [check(name, why_not, device) for name, why_not in known.items()]
        if timed:
            lines = time_kernels(lines, device)
    except Exception as error:
        todo = f"the loss kernels on {device} cannot be tried: {one_line(error)}"
        trouble = [Fact("kernels" if not lines else "speed", one_line(error), todo, failed=True)]
    return lines, [*map(describe, lines), *trouble]


def check(name: str, why_not: str | None, device: torch.device) -> KernelLine:
    """The admission check, anew: what is remembered of it is not asked."""
    line = KernelLine(name, str(device), _is_ours(name))
    if why_not is not None:
        return replace(line, why_not=_first_line(why_not))
    try:
        report = fastaug.check_kernel(name, device)
    except Exception as error:
        return replace(line, admitted=False, worst=one_line(error))
    worst = _first_line(report.worst)
    return replace(line, admitted=report.admitted, cases=report.cases, worst=worst)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _is_ours(name: str) -> bool:
    try:
        return type(load_kernel(name)).__module__.startswith("fastaug.")
    except KernelUnavailableError:
        return False


def describe(line: KernelLine) -> Fact:
    """A line of the table, and what to do about it.

    A kernel of fastaug that is refused is a failure: it should work wherever it is available. One
    of the user's own is shown and is none: "auto" does not take it, and fastaug works without.
    """
    name, place = line.kernel, f"kernel {line.kernel} on {line.device}"
    if line.why_not is not None:
        missed = line.ours and name in _HOME[torch.device(line.device).type]
        if name == "native" and cpp_compiler() is None:
            missed = False  # the compiler has a line of its own
        todo = f"{place}: {line.why_not}" if missed else ""
        return Fact(name, f"not available: {line.why_not}", todo)
    if not line.admitted:
        todo = f"{place} is wrong: mend it (fastaug.check_kernel says more)"
        if line.ours:
            todo = f"{place} is wrong: use --kernel reference, and report what the table says"
        return Fact(name, f"refused: {line.worst}", todo, failed=line.ours)
    value = "admitted"
    if line.speed is not None and name != "reference":
        digits = 0 if line.speed >= 10 else 1 if line.speed >= 1 else 2
        value += f", {line.speed:.{digits}f}x the reference"
    if line.milliseconds is not None:
        value += f", {line.milliseconds:.3g} ms"
    return Fact(name, f"{value}\nworst of {line.cases} cases: {line.worst}")


def _automatic(device: torch.device) -> Iterator[Fact]:
    """As a training would choose."""
    logits = torch.empty(_IMAGES, _VIEWS, _CLASSES, device=device)
    yield Fact("auto", find_kernel("auto", logits).name)


def time_kernels(lines: Sequence[KernelLine], device: torch.device) -> list[KernelLine]:
    """The admitted ones take turns, so that noise hits all alike."""
    calls = {
        line.kernel: _call(load_kernel(line.kernel), device) for line in lines if line.admitted
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    raised: dict[str, str] = {}
    started = time.perf_counter()
    for done in range(-1, _ROUNDS):  # the first round is for warming up
        if done >= _FEWEST_ROUNDS and time.perf_counter() - started > _SECONDS:
            break
        for name, call in calls.items():
            if name not in raised:
                try:
                    samples[name].append(_seconds(call, device))
                except Exception as error:
                    raised[name] = f"B={_IMAGES} K={_VIEWS} C={_CLASSES}: {one_line(error)}"
    return [_with_speed(line, samples, raised) for line in lines]


def _with_speed(
    line: KernelLine, samples: dict[str, list[float]], raised: dict[str, str]
) -> KernelLine:
    if line.kernel in raised:
        return replace(line, admitted=False, worst=raised[line.kernel])
    own = samples.get(line.kernel, [])[1:]
    if own:
        line = replace(line, milliseconds=1e3 * statistics.median(own))
    ratios = [a / b for a, b in zip(samples.get("reference", [])[1:], own, strict=False)]
    return replace(line, speed=statistics.median(ratios)) if ratios else line


def _call(kernel: Kernel, device: torch.device) -> Callable[[], object]:
    logits = torch.randn(_IMAGES, _VIEWS, _CLASSES, device=device)
    targets = torch.randint(_CLASSES, (_IMAGES,), device=device)
    return partial(
        kernel.value_and_grad,
        logits,
        targets,
        average="losses",
        kl_weight=1.0,
        label_smoothing=0.0,
        need_grad=True,
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, until the device has done it."""
    wait: Callable[[], None] = (
        partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    )
    wait()
    started = time.perf_counter()
    for _ in range(_CALLS):
        call()
    wait()
    return (time.perf_counter() - started) / _CALLS


# --- views ---


def look_at_views(device: torch.device, *, timed: bool) -> Iterator[Fact]:
    """What --views-engine auto finds: the admission check, anew."""
    engine = engine_of(device)
    if reason := engine.why_not():
        # The compiler has a line of its own.
        todo = f"fused views on {device}: {reason}" if cpp_compiler() else ""
        yield Fact("fused", f"not available: {_first_line(reason)}", todo)
        yield Fact("auto", "dali")
        return
    report = compare(engine, device)
    value = "admitted" if report.admitted else "refused"
    if report.admitted and timed:
        value += f", {_views_per_second(device):,.0f} views/s"
    todo = f"fused views on {device} are wrong: use --views-engine dali, and report the table"
    yield Fact(
        "fused",
        f"{value}\nworst of {report.cases} cases: {_first_line(report.worst)}",
        "" if report.admitted else todo,
        failed=not report.admitted,
    )
    yield Fact("auto", "fused" if report.admitted else "dali")


def _views_per_second(device: torch.device) -> float:
    """Crop and flip to 224 px, of decoded images of 375 x 500."""
    images = [torch.randint(256, (375, 500, 3), dtype=torch.uint8, device=device)] * 4
    plan = fastaug.plan_views(images, views=_VIEWS, size=224, crop_area=(0.08, 1.0))
    call = partial(fastaug.make_views, images, plan)
    call()
    taken = statistics.median(_seconds(call, device) for _ in range(_FEWEST_ROUNDS))
    return len(images) * _VIEWS / taken


@contextmanager
def _quiet() -> Iterator[None]:
    """The tables say what else would be logged and warned of."""
    log = logging.getLogger("fastaug")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


if __name__ == "__main__":
    sys.exit(cli.run(main))
