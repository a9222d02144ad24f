"""Checks of the loss kernels and view engines on a device: available, correct, and how fast."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import fastaug
from fastaug.diagnostics.fact import Fact, run_check
from fastaug.diagnostics.timing import seconds_of
from fastaug.errors import KernelUnavailableError, describe_error, first_line
from fastaug.kernels.registry import find_kernel, load_kernel
from fastaug.runtime.device import cpp_compiler
from fastaug.views.admission import check_admission
from fastaug.views.engine import engine_of

# Size of the timed logits: enough that overhead does not dominate, small enough for any machine.
_IMAGES, _VIEWS, _CLASSES = 32, 8, 1000
_ROUNDS, _FEWEST_ROUNDS, _CALLS, _SECONDS = 9, 3, 3, 2.0
# fastaug's kernels that should run on a device, besides the reference.
_EXPECTED = {"cpu": ("native",), "cuda": ("cuda", "triton")}


@dataclass(frozen=True)
class KernelResult:
    """Results of the checks of a loss kernel on a device."""

    kernel: str
    device: str
    ours: bool
    why_not: str | None = None
    """Why it is not available; it is not checked then."""
    admitted: bool | None = None
    cases: int = 0
    worst: str = ""
    milliseconds: float | None = None
    """Value and gradient at B=32, K=8, C=1000 fp32."""
    speed: float | None = None
    """Multiple of the reference's speed."""


def check_kernels(
    device: torch.device, *, timed: bool
) -> tuple[list[KernelResult], dict[str, Fact]]:
    """Check all kernels: fastaug's, registered ones, and those of installed distributions."""
    results: list[KernelResult] = []
    errors: dict[str, Fact] = {}
    try:
        known = fastaug.available_kernels(torch.empty(1, 2, 2, device=device))
        results = [check_kernel(name, why_not, device) for name, why_not in known.items()]
        if timed:
            results = time_kernels(results, device)
    except Exception as error:  # a broken driver may fail at any point
        reason = describe_error(error)
        todo = f"the loss kernels on {device} cannot be checked: {reason}"
        errors = {"speed" if results else "kernels": Fact(reason, todo, failed=True)}
    auto = run_check(lambda: Fact(find_kernel("auto", _logits(device)).name))
    return results, {r.kernel: describe(r) for r in results} | errors | {"auto": auto}


def check_kernel(name: str, why_not: str | None, device: torch.device) -> KernelResult:
    """Run the admission check even if its outcome is cached."""
    result = KernelResult(name, str(device), _is_ours(name))
    if why_not is not None:
        return replace(result, why_not=first_line(why_not))
    try:
        report = fastaug.check_kernel(name, device)
    except Exception as error:  # kernels of others may raise anything
        return replace(result, admitted=False, worst=describe_error(error))
    worst = first_line(report.worst)
    return replace(result, admitted=report.admitted, cases=report.cases, worst=worst)


def _is_ours(name: str) -> bool:
    try:
        return type(load_kernel(name)).__module__.startswith("fastaug.")
    except KernelUnavailableError:
        return False


def describe(result: KernelResult) -> Fact:
    """Only a refused kernel of fastaug is a failure: "auto" never picks one of the user's."""
    name, place = result.kernel, f"kernel {result.kernel} on {result.device}"
    if result.why_not is not None:
        expected = result.ours and name in _EXPECTED[torch.device(result.device).type]
        # Without a compiler, the check of the compiler already gives the advice.
        expected = expected and (name != "native" or cpp_compiler() is not None)
        todo = f"{place}: {result.why_not}" if expected else ""
        return Fact(f"not available: {result.why_not}", todo)
    if not result.admitted:
        todo = "use --kernel reference, and please report this table"
        if not result.ours:
            todo = "fix it (fastaug.check_kernel shows more)"
        return Fact(f"refused: {result.worst}", f"{place} is wrong: {todo}", failed=result.ours)
    value = "admitted"
    if result.speed is not None and name != "reference":
        digits = 0 if result.speed >= 10 else 1 if result.speed >= 1 else 2
        value += f", {result.speed:.{digits}f}x the reference"
    if result.milliseconds is not None:
        value += f", {result.milliseconds:.3g} ms"
    return Fact(f"{value}\nworst of {result.cases} cases: {result.worst}")


def time_kernels(results: Sequence[KernelResult], device: torch.device) -> list[KernelResult]:
    """Time the admitted kernels in turns, so that noise affects all of them equally."""
    calls = {result.kernel: _loss(result.kernel, device) for result in results if result.admitted}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    errors: dict[str, str] = {}
    started = time.perf_counter()
    for turn in range(_ROUNDS + 1):  # the first one warms up
        if turn > _FEWEST_ROUNDS and time.perf_counter() - started > _SECONDS:
            break
        for name, call in calls.items():
            if name not in errors:
                try:
                    seconds[name].append(_seconds(call, device))
                except Exception as error:  # kernels of others may raise anything
                    errors[name] = f"B={_IMAGES} K={_VIEWS} C={_CLASSES}: {describe_error(error)}"
    timed = []
    for result in results:
        own = seconds.get(result.kernel, [])[1:]
        ratios = [a / b for a, b in zip(seconds.get("reference", [])[1:], own, strict=False)]
        if result.kernel in errors:
            result = replace(result, admitted=False, worst=errors[result.kernel])
        elif own:
            speed = statistics.median(ratios) if ratios else None
            result = replace(result, milliseconds=1e3 * statistics.median(own), speed=speed)
        timed.append(result)
    return timed


def _loss(kernel: str, device: torch.device) -> Callable[[], object]:
    """A call of the kernel as in a training step."""
    return partial(
        load_kernel(kernel).value_and_grad,
        _logits(device),
        torch.randint(_CLASSES, (_IMAGES,), device=device),
        average="losses",
        kl_weight=1.0,
        label_smoothing=0.0,
        need_grad=True,
    )


def _logits(device: torch.device) -> Tensor:
    return torch.randn(_IMAGES, _VIEWS, _CLASSES, device=device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device has finished it."""
    return seconds_of(call, _CALLS, device) / _CALLS


def check_views(device: torch.device, *, timed: bool) -> dict[str, Fact]:
    """Check the fused view engine, and what --views-engine auto then means."""
    fused = run_check(partial(_fused_views, device, timed=timed))
    auto = "fused" if fused.value.startswith("admitted") else "dali"
    return {"fused": fused, "auto": Fact(auto)}


def _fused_views(device: torch.device, *, timed: bool) -> Fact:
    """Run the admission check even if its outcome is cached."""
    engine = engine_of(device)
    if why_not := engine.why_not():
        reason = first_line(why_not)
        # Without a compiler, the check of the compiler already gives the advice.
        todo = f"fused views on {device}: {reason}" if cpp_compiler() else ""
        return Fact(f"not available: {reason}", todo)
    report = check_admission(engine, device, again=True)
    worst = f"worst of {report.cases} cases: {first_line(report.worst)}"
    if not report.admitted:
        todo = f"fused views on {device} are wrong: use --views-engine dali, and please report this"
        return Fact(f"refused\n{worst}", todo, failed=True)
    speed = f", {_views_per_second(device):,.0f} views/s" if timed else ""
    return Fact(f"admitted{speed}\n{worst}")


def _views_per_second(device: torch.device) -> float:
    """Speed of cropping and flipping decoded images of 375 x 500 to 224 px."""
    images = [torch.randint(256, (375, 500, 3), dtype=torch.uint8, device=device)] * 4
    plan = fastaug.plan_views(images, views=_VIEWS, size=224, crop_area=(0.08, 1.0))
    call = partial(fastaug.make_views, images, plan)
    call()
    seconds = statistics.median(_seconds(call, device) for _ in range(_FEWEST_ROUNDS))
    return len(images) * _VIEWS / seconds
