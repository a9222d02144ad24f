"""What the step model predicts for a GPU, beside what a report has measured on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, get_args

from fastaug.diagnostics import step_model
from fastaug.diagnostics.gpu_report.results import GpuReport
from fastaug.diagnostics.step_model import Case, Rates, Work


class Compared(NamedTuple):
    """A measured figure and its prediction, with its slow and its fast end."""

    quantity: str
    k: int
    unit: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted

    @property
    def inside(self) -> bool:
        """True if the measured figure lies between the ends of the prediction."""
        return min(self.low, self.high) <= self.measured <= max(self.low, self.high)


def known_gpu(name: str) -> str | None:
    """The GPU of the step model with this name of torch's; None if the model does not have it."""
    return next((gpu for gpu in step_model.GPUS if re.search(rf"\b{gpu}\b", name)), None)


def why_not(report: GpuReport) -> str:
    """Why nothing can be compared; "" if it can."""
    if known_gpu(report.gpus[0] if report.gpus else "") is None:
        known = ", ".join(step_model.GPUS)
        return f"the step model knows {known}, not {', '.join(report.gpus) or 'this machine'}"
    part = report.part("throughput")
    if part is None or (table := part.table("throughput")) is None or not table.rows:
        return 'the report has no measurement of the part "throughput"'
    return ""


def compare_prediction(report: GpuReport) -> list[Compared]:
    """Each measured figure that the model predicts; call it if why_not() is empty."""
    gpu, part = known_gpu(report.gpus[0]), report.part("throughput")
    assert gpu is not None
    assert part is not None
    tables = {table.name: table.records() for table in part.tables}
    (settings,) = tables["settings"]
    precision, on_host = settings["precision"], settings["loader"] != "dali"
    rates = {
        case: step_model.gpu_rates(
            gpu,
            case,
            precision=precision,
            augment=settings["augmentation"],
            decode_on_host=on_host,
        )
        for case in get_args(Case)
    }
    found = []
    for row in tables["decode"]:
        values = (rates[case].decode for case in ("mid", "low", "high"))
        found.append(Compared("decoding", 0, "images/s", row["images/s"], *values))
    for row in tables["throughput"]:
        shape = (settings["model"], settings["classes"], settings["size"], row["views in a step"])
        work = step_model.network_work(*shape, precision)
        predicted = {case: dict(_figures(work, own, row["K"])) for case, own in rates.items()}
        for name, (unit, _) in predicted["mid"].items():
            values = (predicted[case][name][1] for case in ("mid", "low", "high"))
            found.append(Compared(name, row["K"], unit, row[name], *values))
    return found


def _figures(work: Work, rates: Rates, k: int) -> Iterator[tuple[str, tuple[str, float]]]:
    """Column of the table "throughput" -> its unit and prediction."""
    step = step_model.predict(work, rates, k=k)
    yield "images/s", ("1/s", step.images)
    yield "step", ("ms", 1e3 * step.seconds)
    seconds = {
        "views": step_model.view_seconds(work, rates),
        "forward": sum(step_model.roofline(work.forward, rates)),
        "loss": step_model.objective_seconds(work, rates),
        "backward": sum(step_model.roofline(work.backward, rates)),
        "update": step_model.optimizer_seconds(work, rates),
    }
    for name, value in seconds.items():
        yield name, ("ms", 1e3 * value)
