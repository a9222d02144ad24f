"""Choosing the learning rate and number of epochs of each setting, as the paper does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from tyro.conf import arg

from fastaug.errors import DataError
from fastaug.experiments.results import Family, Results
from fastaug.experiments.run import Run, Setting, setting_of
from fastaug.kernels.config import Average

Images = Literal["validation", "test"]
SelectOn = Literal["auto", "validation", "test"]

RunsFlag = Annotated[
    tuple[str, ...],
    arg(metavar="RUNS...", help="Run folders, or folders above run folders."),
]
SelectOnFlag = Annotated[
    SelectOn,
    arg(
        help="In sweeps: images for choosing each setting's learning rate and epochs by top-1. "
        "auto: held-out images if all runs have some, else the test images, as in the paper."
    ),
]

REGULARIZER = {False: "without the regularizer", True: "with the regularizer"}


@dataclass(frozen=True)
class Chosen:
    """The runs of a setting at its best learning rate and number of epochs, one per seed."""

    setting: Setting
    lr: float
    epochs: int
    score: float
    """Top-1 on central crops of the images used for choosing."""
    candidates: int
    """Number of (learning rate, epochs) pairs to choose from."""
    runs: tuple[Run, ...]
    edges: tuple[str, ...] = ()
    """Edges of the grid that the best point lies on ("largest lr", "fewest epochs"): points beyond
    them may be better."""

    def values(self, measure: str) -> list[float]:
        """A measure on the test images, per seed; runs without it are left out."""
        found = (run.measures.get(measure) for run in self.runs)
        return [value for value in found if value is not None]

    def mean(self, measure: str) -> float | None:
        """Mean over the seeds."""
        values = self.values(measure)
        return fmean(values) if values else None


@dataclass(frozen=True)
class Selected:
    """A family and the chosen runs of its settings: the input of figures and tables."""

    family: Family
    on: Images
    """Images used for choosing."""
    chosen: Mapping[Setting, Chosen]

    @property
    def multiplicities(self) -> list[int]:
        """Numbers of views K of the runs with augmentation, ascending."""
        return sorted({setting.views for setting in self.chosen if setting.augmented})

    @property
    def largest_k(self) -> int:
        return max(self.multiplicities, default=1)

    @property
    def regularizer_weight(self) -> float:
        """KL weight of "with the regularizer": the paper's 1 if it was run, otherwise the weight of
        most settings; 1 if no run has the regularizer."""
        weights = Counter(setting.kl_weight for setting in self.chosen if setting.kl_weight)
        if not weights or 1.0 in weights:
            return 1.0
        return max(weights, key=lambda weight: (weights[weight], -abs(weight - 1)))

    def at(self, views: int, average: Average, *, regularized: bool = False) -> Chosen | None:
        return self.at_weight(views, average, self.regularizer_weight if regularized else 0.0)

    def at_weight(self, views: int, average: Average, kl_weight: float) -> Chosen | None:
        """The chosen runs of one setting. At K=1 all objectives are the same setting."""
        if views == 1:
            return self.chosen.get(Setting(1, "losses", 0.0))
        return self.chosen.get(Setting(views, average, kl_weight))


def missing_objectives(found: Container[tuple[str, bool]], averages: Sequence[str]) -> list[str]:
    """Objectives that were not run: with the regularizer, without it, or both.

    found: (average, regularized) of the runs.
    """
    words = []
    for average in averages:
        absent = [how for key, how in REGULARIZER.items() if (average, key) not in found]
        several = len(absent) == len(REGULARIZER)
        words += [f"average {average}"] if several else [f"average {average} {h}" for h in absent]
    return words


def select_families(
    results: Results, asked: SelectOn = "auto", *, with_epochs: bool = False
) -> list[Selected]:
    selected = []
    for family in results.families:
        on = resolve_select_on(family.runs, asked)
        chosen = select(family.runs, on, with_epochs=with_epochs)
        selected.append(Selected(family, on, chosen))
    return selected


def resolve_select_on(runs: Sequence[Run], asked: SelectOn) -> Images:
    """The images for choosing. auto: held-out images if every run has some, else test images."""
    without = [run for run in runs if run.validation is None]
    if asked == "validation" and without:
        raise DataError(
            f"--select-on validation: {without[0].folder} has no held-out images; train with "
            "--validation 0.1, or use --select-on test"
        )
    return "test" if asked == "test" or without else "validation"


def select(runs: Iterable[Run], on: Images, *, with_epochs: bool = False) -> dict[Setting, Chosen]:
    """The best candidate of each setting, by mean top-1 over the seeds that all candidates have.

    with_epochs: numbers of epochs are settings, not candidates: only the learning rate is chosen.
    """
    by_setting: defaultdict[Setting, defaultdict[tuple[float, int], dict[int, Run]]]
    by_setting = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        setting = setting_of(run.config, with_epochs=with_epochs)
        point = run.config.optim.lr, run.config.optim.epochs
        by_setting[setting][point][run.config.run.seed] = run
    return {setting: _best(setting, found, on) for setting, found in sorted(by_setting.items())}


def _best(
    setting: Setting, candidates: dict[tuple[float, int], dict[int, Run]], on: Images
) -> Chosen:
    # The best candidate may have more seeds than the others: only common seeds are compared.
    common = set.intersection(*(set(by_seed) for by_seed in candidates.values()))

    def score(by_seed: dict[int, Run]) -> float:
        return fmean(_top1(run, on) for seed, run in by_seed.items() if seed in (common or by_seed))

    # The cheapest of equally good candidates.
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
    """The name of the end of `tried` that the best value lies at."""
    if len(tried) == 1 or len(best) > 1:
        return []
    return [lowest] if min(tried) in best else [highest] if max(tried) in best else []


def _top1(run: Run, on: Images) -> float:
    measures = run.validation if on == "validation" else run.measures
    assert measures is not None, f"{run.folder} has no held-out images"
    return measures["top1"]
