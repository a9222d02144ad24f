"""Which learning rate and epoch budget is taken for each setting, as the paper does it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fastaug.errors import DataError
from fastaug.experiments.results import Family, Results, Run, Setting

Images = Literal["validation", "test"]
SelectOn = Literal["auto", "validation", "test"]


@dataclass(frozen=True)
class Chosen:
    """The runs of a setting at its best learning rate and number of epochs: one for each seed."""

    setting: Setting
    lr: float
    epochs: int
    score: float
    """What it was chosen by: top-1 of the central crop."""
    candidates: int
    """Pairs of learning rate and epochs that it was chosen from."""
    runs: tuple[Run, ...]
    edges: tuple[str, ...] = ()
    """Where the choice lies on the edge of the grid, beyond which a better one may be: "largest
    lr", "fewest epochs"."""

    def values(self, measure: str) -> list[float]:
        """A measure on the test images, for each seed; runs that lack it are left out."""
        found = (run.measures.get(measure) for run in self.runs)
        return [value for value in found if value is not None]

    def mean(self, measure: str) -> float | None:
        """Over the seeds."""
        values = self.values(measure)
        return fmean(values) if values else None


@dataclass(frozen=True)
class Selected:
    """A family, and what was chosen in it: all that figures and tables are made of."""

    family: Family
    on: Images
    """Which images the choice was made by."""
    chosen: Mapping[Setting, Chosen]


def select_families(results: Results, asked: SelectOn = "auto") -> list[Selected]:
    selected = []
    for family in results.families:
        on = resolve_select_on(family.runs, asked)
        selected.append(Selected(family, on, select(family.runs, on)))
    return selected


def resolve_select_on(runs: Sequence[Run], asked: SelectOn) -> Images:
    """auto: the validation images where every run has held some out, else the test images."""
    without = [run for run in runs if run.validation is None]
    if asked == "validation" and without:
        raise DataError(
            f"--select-on validation: {without[0].folder} has held out no images; train with "
            "--validation 0.1, or use --select-on test"
        )
    if asked == "test" or without:
        return "test"
    return "validation"


def select(runs: Iterable[Run], on: Images) -> dict[Setting, Chosen]:
    """The best candidate of each setting, by mean top-1 over the seeds that all of them have."""
    by_setting: defaultdict[Setting, defaultdict[tuple[float, int], dict[int, Run]]]
    by_setting = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        by_setting[run.setting][run.config.optim.lr, run.config.optim.epochs][
            run.config.run.seed
        ] = run
    return {setting: _best(setting, found, on) for setting, found in sorted(by_setting.items())}


def _best(
    setting: Setting, candidates: dict[tuple[float, int], dict[int, Run]], on: Images
) -> Chosen:
    # The chosen one may have been run with more seeds than the others: those do not count here.
    common = set.intersection(*(set(by_seed) for by_seed in candidates.values()))

    def score(by_seed: dict[int, Run]) -> float:
        return fmean(_top1(run, on) for seed, run in by_seed.items() if seed in (common or by_seed))

    # Of equals the cheaper one.
    (lr, epochs), by_seed = max(
        candidates.items(), key=lambda item: (score(item[1]), -item[0][1], -item[0][0])
    )
    ordered = tuple(by_seed[seed] for seed in sorted(by_seed))
    best = [point for point, runs in candidates.items() if score(runs) == score(by_seed)]
    edges = (
        *_edge({p[0] for p in best}, {p[0] for p in candidates}, "smallest lr", "largest lr"),
        *_edge({p[1] for p in best}, {p[1] for p in candidates}, "fewest epochs", "most epochs"),
    )
    return Chosen(setting, lr, epochs, score(by_seed), len(candidates), ordered, edges)


def _edge(
    best: Collection[float], tried: Collection[float], lowest: str, highest: str
) -> list[str]:
    """Where all of the best lie at one end of what was tried."""
    if len(tried) == 1 or len(best) > 1:
        return []
    return [lowest] if min(tried) in best else [highest] if max(tried) in best else []


def _top1(run: Run, on: Images) -> float:
    measures = run.validation if on == "validation" else run.measures
    assert measures is not None, f"{run.folder} has held out no images"
    return measures["top1"]
