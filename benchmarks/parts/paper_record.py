"""Tables and figures of docs/paper.md, from the record in benchmarks/results/paper-small."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

from fastaug.experiments.compute_figure import Budgets, budgets
from fastaug.experiments.difference import Difference, difference
from fastaug.experiments.paper_figures import draw_figures
from fastaug.experiments.plotting import Drawn, render
from fastaug.experiments.record import RUNS
from fastaug.experiments.results import find_results
from fastaug.experiments.run import Setting
from fastaug.experiments.selection import Chosen, Selected, select, select_families
from fastaug.kernels.config import Average
from parts.results import Table

NOT_RUN, UNCLEAR = "not run", "unclear"
EQUAL = {"top1": 0.01, "invariance": 0.1}
"""Two settings are called equal if the 95% confidence interval of their difference contains 0 and
reaches less than this to each side."""
_TARGETS = (40, 42, 44, 46, 48, 50)
"""Accuracies in percent for the time table."""


class Record:
    """The chosen runs of each sweep of a record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = find_results([folder])

    @cached_property
    def digest(self) -> str:
        """Names the record that a table or a figure was made from."""
        return hashlib.sha256((self.folder / RUNS).read_bytes()).hexdigest()[:12]

    @cached_property
    def selected(self) -> dict[tuple[str, str], Selected]:
        """By sweep and model."""
        return {
            (sweep, one.family.config.model.model): one
            for one in select_families(self.results)
            if (sweep := one.family.sweep)
        }

    def chosen(self, point: Point) -> Chosen | None:
        """The chosen runs of a setting, at its number of epochs if it names one."""
        one = self.selected.get((point.sweep, point.model))
        if one is None:
            return None
        setting = Setting(*point.setting, epochs=point.epochs)
        if not point.epochs:
            return one.chosen.get(setting)
        return select(one.family.runs, one.on, with_epochs=True).get(setting)

    def of(self, sweep: str) -> list[Selected]:
        """The families of a sweep."""
        return [one for (name, _), one in self.selected.items() if name == sweep]


@dataclass(frozen=True)
class Point:
    """A setting of a sweep."""

    sweep: str
    views: int = 1
    average: Average = "losses"
    kl_weight: float = 0.0
    epochs: int = 0
    """0: the only ones that the sweep has."""
    model: str = "wrn-10-2"

    @property
    def setting(self) -> tuple[int, Average, float]:
        return self.views, self.average, self.kl_weight


@dataclass(frozen=True)
class Comparison:
    """A row: the first setting minus the second."""

    text: str
    one: Point
    other: Point
    paper: str = ""
    """The same difference in the paper."""
    claim: int | None = 1
    """What is claimed: 1: a positive difference, -1: a negative one, 0: none, None: nothing."""


@dataclass(frozen=True)
class Question:
    """A claim of the paper, or a question that it leaves open, with the differences that answer it.

    The first row stands for the question in short tables.
    """

    text: str
    rows: Sequence[Comparison]
    measure: str = "top1"
    """What is claimed of: top1, or invariance."""
    minus: str = ""
    """Measure of the second setting, if another."""

    def gap(self, record: Record, row: Comparison) -> Difference | None:
        """The difference that the claim is about; None if it was not run."""
        one, other = record.chosen(row.one), record.chosen(row.other)
        if one is None or other is None:
            return None
        return difference(one, other, self.measure, self.minus)

    def verdict(self, row: Comparison, gap: Difference | None) -> str:
        """What the runs say of a row's claim."""
        if gap is None or gap.seeds == 1 or row.claim is None:
            return ""
        if row.claim == 0:
            equal = "yes" if gap.margin < EQUAL[self.measure] else UNCLEAR
            return "no" if gap.is_clear else equal
        if not gap.is_clear:
            return UNCLEAR
        return "yes" if row.claim * gap.mean > 0 else "no"

    def summary(self, record: Record) -> str:
        """The verdicts of all rows: "yes", or how many of each."""
        found = [verdict for row in self.rows if (verdict := self.verdict(row, self.gap(record, row)))]
        counts = Counter(found).most_common()
        if len(counts) < 2:
            return counts[0][0] if counts else NOT_RUN
        return ", ".join(f"{count} {verdict}" for verdict, count in counts)


_views = partial(Point, "small-views")
_plain, _kl = partial(_views, kl_weight=0.0), partial(_views, kl_weight=1.0)
_cost = partial(Point, "small-compute")
_tuned = partial(Point, "small-finetune")
_NORMED = "resnet18-16"
_norm = partial(Point, "small-batchnorm", model=_NORMED)
_strong = partial(Point, "small-randaugment")
_SMALLER, _LARGER = "wrn-10-1", "wrn-16-2"


def _kl_gaps(claim: int, **paper: str) -> list[Comparison]:
    """λ=1 against λ=0 for the objectives and numbers of views."""
    cases = ((4, "losses"), (4, "probs"), (4, "logits"), (2, "losses"), (2, "logits"))
    return [
        Comparison(f"K={k}, {a}: λ=1 - λ=0", _kl(k, a), _plain(k, a), paper.get(a, ""), claim)
        for k, a in (*cases, (8, "losses"), (8, "logits"))
    ]


# The paper's numbers are of CIFAR-100, WRN-16-4, K=16 (Tab. 1), unless the text says otherwise.
QUESTIONS: Sequence[Question] = (
    Question(
        "without the KL, averaged losses beat averaged logits and probabilities",
        [
            Comparison(f"K={k}: losses - logits", _plain(k), _plain(k, "logits"), paper)
            for k, paper in ((8, "+10.7"), (4, "+10.7"), (2, ""))
        ]
        + [Comparison("K=4: losses - probs", _plain(4), _plain(4, "probs"), "+2.5")],
    ),
    Question(
        "averaged logits make predictions less invariant than losses, more so at larger K",
        [
            Comparison("K=8: logits - losses", _plain(8, "logits"), _plain(8), "positive"),
            Comparison("K=4: logits - losses", _plain(4, "logits"), _plain(4), "positive"),
            Comparison("K=2: logits - losses", _plain(2, "logits"), _plain(2), "positive"),
            Comparison("logits: K=8 - K=2", _plain(8, "logits"), _plain(2, "logits"), "positive"),
        ],
        measure="invariance",
    ),
    Question(
        "with averaged losses invariance does not depend on K",
        [
            Comparison("K=4 - K=1, 80 epochs", _plain(4), _plain(1), "about 0", 0),
            Comparison("K=8 - K=1, 80 epochs", _plain(8), _plain(1), "about 0", 0),
            Comparison(
                "K=4 for 320 epochs - K=1 for 1,280",
                _cost(4, epochs=320),
                _cost(1, epochs=1280),
                "about 0",
                0,
            ),
        ],
        measure="invariance",
    ),
    Question(
        "the KL (λ = 1) improves accuracy with all objectives",
        [
            *_kl_gaps(1, losses="+0.9", probs="+3.3", logits="+11.6"),
            Comparison(
                "K=4 for 320 epochs, losses: λ=1 - λ=0",
                _cost(4, kl_weight=1.0, epochs=320),
                _cost(4, epochs=320),
                "+0.9",
            ),
        ],
    ),
    Question(
        "the KL makes predictions more invariant with all objectives",
        [
            *_kl_gaps(-1, losses="negative", probs="negative", logits="negative"),
            Comparison(
                "K=4 for 320 epochs, losses: λ=1 - λ=0",
                _cost(4, kl_weight=1.0, epochs=320),
                _cost(4, epochs=320),
                "negative",
                -1,
            ),
        ],
        measure="invariance",
    ),
    Question(
        "with the KL the objectives are equally accurate",
        [
            Comparison("K=4: logits - losses", _kl(4, "logits"), _kl(4), "0.0", 0),
            Comparison("K=4: probs - losses", _kl(4, "probs"), _kl(4), "-0.1", 0),
            Comparison("K=8: logits - losses", _kl(8, "logits"), _kl(8), "0.0", 0),
        ],
    ),
    Question(
        "averaging predictions over views at test time helps",
        [
            Comparison(f"K={k}{how}: TTA - central crop", point(k), point(k), paper)
            for k, how, point, paper in (
                (1, "", _plain, "+1.8"),
                (4, ", λ=0", _plain, "+1.8"),
                (4, ", λ=1", _kl, "+1.3"),
            )
        ],
        measure="tta_top1",
        minus="top1",
    ),
    Question(
        "K views beat one at equal epochs",
        [
            Comparison("K=4, λ=1 - K=1", _kl(4), _plain(1), "+1.8"),
            Comparison("K=4, λ=0 - K=1", _plain(4), _plain(1), "+0.9"),
            Comparison("K=8, λ=1 - K=1", _kl(8), _plain(1), "+1.8"),
            Comparison("K=8, λ=0 - K=1", _plain(8), _plain(1), "+0.9"),
        ],
    ),
    Question(
        "K views beat one at equal compute",
        [
            Comparison(
                f"K={k} for {epochs} epochs, λ={weight} - K=1 for {k * epochs:,}",
                _cost(k, kl_weight=weight, epochs=epochs),
                _cost(1, epochs=k * epochs),
            )
            for k, epochs in ((4, 320), (4, 80), (8, 80), (8, 160))
            for weight in (1, 0)
        ],
    ),
    Question(
        "accuracy is flat in λ around 1, and lower at 0",
        [
            Comparison(
                f"K=4: λ={weight:g} - λ=1",
                Point("small-lambda", 4, kl_weight=weight),
                Point("small-lambda", 4, kl_weight=1.0),
                claim=claim,
            )
            for weight, claim in ((2.0, 0), (0.5, 0), (0.0, -1), (5.0, None))
        ],
    ),
    Question(
        "the KL helps smaller and larger networks",
        [
            Comparison(
                f"{model}, K=4: λ=1 - λ=0",
                Point("small-capacity", 4, kl_weight=1.0, model=model),
                Point("small-capacity", 4, model=model),
            )
            for model in (_LARGER, _SMALLER)
        ],
    ),
    Question(
        "both effects hold with RandAugment",
        [
            Comparison("K=4: λ=1 - λ=0", _strong(4, kl_weight=1.0), _strong(4), "+0.6 (NFNet-F0)"),
            Comparison("K=4, λ=0 - K=1", _strong(4), _strong(1), "+1.0 (NFNet-F0, K=8)"),
        ],
    ),
    Question(
        "with batch norm, several views help with losses and with logits",
        [
            Comparison("K=4, logits, λ=0 - K=1", _norm(4, "logits"), _norm(1), "positive"),
            Comparison("K=4, losses, λ=0 - K=1", _norm(4), _norm(1), "positive"),
            Comparison("K=4, losses: λ=1 - λ=0", _norm(4, kl_weight=1.0), _norm(4), "positive"),
        ],
    ),
    Question(
        "fine-tuning: K views beat one at equal epochs",
        [
            Comparison(
                f"K={k}, λ={w} - K=1", _tuned(k, kl_weight=w, epochs=80), _tuned(1, epochs=80)
            )
            for k in (4, 8)
            for w in (1, 0)
        ],
    ),
    Question(
        "fine-tuning: K views beat one at equal compute",
        [
            Comparison(
                f"K={k} for 80 epochs, λ={w} - K=1 for {80 * k}",
                _tuned(k, kl_weight=w, epochs=80),
                _tuned(1, epochs=80 * k),
            )
            for k in (4, 8)
            for w in (1, 0)
        ],
    ),
)


# --- tables ---


def claims(record: Record) -> list[str]:
    """Every claim with its main difference and what all of its differences say."""
    lines = []
    for question in QUESTIONS:
        row = next((r for r in question.rows if question.gap(record, r)), None)
        found = _text(question.gap(record, row), question.measure) if row else ""
        unit = f"{found} {_UNITS[question.measure]}" if found else ""
        cells = [row.text, unit, row.paper] if row else ["", "", ""]
        lines.append([question.text, *cells, question.summary(record)])
    return Table(["claim", "difference", "here", "in the paper", "seen"], lines).markdown()


def comparisons(record: Record) -> list[str]:
    """Every difference that was run with its standard error; those that count are bold."""
    lines, done = [], 0
    for question in QUESTIONS:
        found = [cells for row in question.rows if (cells := _comparison(record, question, row))]
        done += len(found)
        found = found or [["", "", "", "", "", "", NOT_RUN]]
        lines += [[question.text * (place == 0), *cells] for place, cells in enumerate(found)]
    head = ["claim", "difference", "top-1, points", "TTA, points", "invariance, nats", "seeds"]
    table = Table([*head, "in the paper", "seen"], lines).markdown()
    total = sum(len(question.rows) for question in QUESTIONS)
    return [*table, "", f"{done} of {total} differences have been run."]


def _comparison(record: Record, question: Question, row: Comparison) -> list[str]:
    """The cells of a row; empty if it was not run."""
    gap = question.gap(record, row)
    if gap is None:
        return []
    if question.minus:  # two measures of one setting
        texts = ["", _text(gap, question.measure), ""]
    else:
        one, other = record.chosen(row.one), record.chosen(row.other)
        assert one is not None
        assert other is not None
        texts = [_text(difference(one, other, name), name) for name, _ in _MEASURES]
    return [row.text, *texts, str(gap.seeds), row.paper, question.verdict(row, gap)]


def _text(gap: Difference | None, measure: str) -> str:
    if gap is None:
        return ""
    scale = dict(_MEASURES)[measure]
    digits = 1 if scale > 1 else 2
    mean = f"{scale * gap.mean:+.{digits}f}"
    if gap.seeds == 1:
        return mean
    text = f"{mean} ± {scale * gap.error:.{digits}f}"
    return f"**{text}**" if gap.is_clear else text


def settings(record: Record) -> list[str]:
    """Every setting with its chosen rate and its measures."""
    lines = []
    for (sweep, model), one in record.selected.items():
        chosen = select(one.family.runs, one.on, with_epochs=True)
        for setting, own in chosen.items():
            rate = f"2^{math.log2(own.lr):g}"
            cells = [_mean(own, name, scale) for name, scale in _MEASURES]
            nll = [run.records[-1]["nll"] for run in own.runs if run.records]
            fitted = f"{fmean(nll):.2f}" if nll else ""
            first = [sweep.removeprefix("small-"), model, setting.label]
            lines.append([*first, rate, str(len(own.runs)), *cells, fitted])
    head = ["sweep", "network", "setting", "rate", "seeds", "top-1 %", "TTA %", "invariance"]
    return Table([*head, "training nll"], lines).markdown()


_MEASURES = (("top1", 100.0), ("tta_top1", 100.0), ("invariance", 1.0))
_UNITS = {"top1": "points", "tta_top1": "points", "invariance": "nats"}


def _mean(chosen: Chosen, name: str, scale: float) -> str:
    values = [scale * value for value in chosen.values(name)]
    digits = 1 if scale > 1 else 2
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def time_to_accuracy(record: Record) -> list[str]:
    """Views and minutes to an accuracy, between the budgets that were run."""
    (one,) = record.of("small-compute") or [None]
    if one is None:
        return [NOT_RUN]
    found = budgets(one)
    if len(found) < 2:
        return [NOT_RUN]  # nothing to compare with
    speed = median(
        run.summary["timing"]["views_per_s"]
        for points in found.values()
        for chosen in points.values()
        for run in chosen.runs
    )
    lines = []
    for target in _TARGETS:
        costs = [cost_of(points, target / 100) for points in found.values()]
        if any(cost is not None for cost in costs):
            lines.append([f"{target}%", *(_cost_text(cost, speed) for cost in costs)])
    names = [f"K={k}" + (", λ=1" if how else ", λ=0" * (k > 1)) for k, how in found]
    return Table(["top-1", *names], lines).markdown()


def cost_of(points: Budgets, target: float) -> float | None:
    """Views to a mean top-1, interpolated over the logarithm of the views; None if no budget has
    it, and the smallest budget if that already has."""
    means = [(cost, chosen.mean("top1") or 0.0) for cost, chosen in points.items()]
    if means[0][1] >= target:
        return means[0][0]
    for (low, before), (high, after) in pairwise(means):
        if after >= target:
            share = (target - before) / (after - before)
            return low * (high / low) ** share
    return None


def _cost_text(cost: float | None, speed: float) -> str:
    if cost is None:
        return "not reached"
    return f"{cost / 1e3:,.0f}k views, {cost / speed / 60:.1f} min"


def in_short(record: Record) -> list[str]:
    """The rows of the README."""
    points = {
        "K=1, 80 epochs": _plain(1),
        "K=1, 320 epochs": _cost(1, epochs=320),
        "K=4, 80 epochs": _plain(4),
        "K=4 + KL, 80 epochs": _kl(4),
    }
    lines = []
    for name, (measure, scale) in zip(
        ("top-1 %", "top-1 % with TTA", "invariance, nats"), _MEASURES, strict=True
    ):
        found = [record.chosen(point) for point in points.values()]
        lines.append([name, *(_mean(c, measure, scale) if c else NOT_RUN for c in found)])
    return Table(["", *points], lines).markdown()


TABLES: Mapping[str, Callable[[Record], list[str]]] = {
    "paper-claims": claims,
    "paper-comparisons": comparisons,
    "paper-settings": settings,
    "paper-time": time_to_accuracy,
    "paper-short": in_short,
}


# --- figures ---


def figures(record: Record) -> Iterator[tuple[str, Drawn]]:
    """The figures by file name; those whose runs are missing are left out."""
    for sweep, kinds in _FIGURES.items():
        for one in record.of(sweep)[:1]:
            for kind in kinds:
                shown = record.of(sweep) if kind == "capacity" else [one]
                for drawn in draw_figures(shown, [kind]):
                    if drawn.figure is not None:
                        yield f"paper-{sweep.removeprefix('small-')}-{kind}.png", drawn


_FIGURES = {
    "small-views": ("extended", "curves"),
    "small-compute": ("compute", "curves"),
    "small-finetune": ("compute",),
    "small-lambda": ("kl-weight",),
    "small-randaugment": ("randaugment",),
    "small-batchnorm": ("extended",),
    "small-capacity": ("capacity",),
}


def png(drawn: Drawn, digest: str) -> bytes:
    """A figure as a file that names its record."""
    assert drawn.figure is not None
    return render(drawn.figure, "png", digest)
