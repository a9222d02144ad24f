"""The paper's claims and the questions it leaves open, each with the differences that answer it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastaug.experiments.difference import EQUAL_WITHIN, Difference, difference
from parts.paper_record import Point, Record

NOT_RUN, UNCLEAR = "not run", "unclear"


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
            equal = "yes" if gap.is_within(EQUAL_WITHIN[self.measure]) else UNCLEAR
            return "no" if gap.is_clear else equal
        if not gap.is_clear:
            return UNCLEAR
        return "yes" if row.claim * gap.mean > 0 else "no"

    def summary(self, record: Record) -> str:
        """The verdicts of all rows: "yes", or how many of each."""
        counts = Counter(self.verdict(row, self.gap(record, row)) for row in self.rows)
        found = [verdict for verdict in ("yes", "no", UNCLEAR) if counts[verdict]]
        if len(found) < 2:
            return found[0] if found else NOT_RUN
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in found)


_views = partial(Point, "small-views")
_plain, _kl = partial(_views, kl_weight=0.0), partial(_views, kl_weight=1.0)
_cost = partial(Point, "small-compute")
_more = partial(Point, "small-data", epochs=80)
_tuned = partial(Point, "small-finetune")
_NORMED = "resnet18-16"
_norm = partial(Point, "small-batchnorm", model=_NORMED)
NORM_LONGER = partial(Point, "small-batchnorm-longer", model=_NORMED)
_strong = partial(Point, "small-randaugment")
STRONG_LONGER = partial(Point, "small-randaugment-longer")
_LONGER = (("RandAugment", STRONG_LONGER), ("batch norm", NORM_LONGER))
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
            *(
                Comparison(
                    f"K=4 for 320 epochs - K=1 for {epochs:,}",
                    _cost(4, epochs=320),
                    _cost(1, epochs=epochs),
                    "about 0",
                    0,
                )
                for epochs in (320, 1280)
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
            Comparison(
                "4,096 images, K=4, losses: λ=1 - λ=0", _more(4, kl_weight=1.0), _more(4), "+0.9"
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
            Comparison(
                "4,096 images, K=4, losses: λ=1 - λ=0",
                _more(4, kl_weight=1.0),
                _more(4),
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
            *(
                Comparison(
                    f"K=2, λ={weight} - K=1",
                    _cost(2, kl_weight=weight, epochs=80),
                    _cost(1, epochs=80),
                    paper,
                )
                for weight, paper in ((1, "+1.8"), (0, "+0.9"))
            ),
            *(
                Comparison(
                    f"K=4, λ={weight} - K=1, 320 epochs",
                    _cost(4, kl_weight=weight, epochs=320),
                    _cost(1, epochs=320),
                    paper,
                )
                for weight, paper in ((1, "+1.8"), (0, "+0.9"))
            ),
            *(
                Comparison(
                    f"4,096 images: K=4, λ={weight} - K=1",
                    _more(4, kl_weight=weight),
                    _more(1),
                    paper,
                )
                for weight, paper in ((1, "+1.8"), (0, "+0.9"))
            ),
            *(
                Comparison(
                    f"{what}: K=4, λ=1 - K=1",
                    point(4, kl_weight=1.0, epochs=80),
                    point(1, epochs=80),
                )
                for what, point in _LONGER
            ),
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
            for k, epochs in ((4, 80), (2, 80), (8, 80), (4, 320))
            for weight in (1, 0)
        ]
        + [
            Comparison(
                f"4,096 images: K=4 for 80 epochs, λ={weight} - K=1 for 320",
                _more(4, kl_weight=weight),
                _more(1, epochs=320),
            )
            for weight in (1, 0)
        ]
        + [
            Comparison(
                f"{what}: K=4 for 80 epochs, λ={weight} - K=1 for 320",
                point(4, kl_weight=weight, epochs=80),
                point(1, epochs=320),
            )
            for what, point in _LONGER
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
                "positive",
            )
            for model in (_LARGER, _SMALLER)
        ],
    ),
    Question(
        "both effects hold with RandAugment",
        [
            Comparison("K=4: λ=1 - λ=0", _strong(4, kl_weight=1.0), _strong(4), "+0.6 (NFNet-F0)"),
            Comparison("K=4, λ=0 - K=1", _strong(4), _strong(1), "+1.0 (NFNet-F0, K=8)"),
            Comparison(
                "K=4 for 320 epochs: λ=1 - λ=0",
                STRONG_LONGER(4, kl_weight=1.0, epochs=320),
                STRONG_LONGER(4, epochs=320),
                "+0.6 (NFNet-F0)",
            ),
            Comparison(
                "K=4, λ=0 - K=1, 320 epochs",
                STRONG_LONGER(4, epochs=320),
                STRONG_LONGER(1, epochs=320),
                "+1.0 (NFNet-F0, K=8)",
            ),
        ],
    ),
    Question(
        "with batch norm, several views help with losses and with logits",
        [
            Comparison("K=4, losses, λ=0 - K=1", _norm(4), _norm(1), "positive"),
            Comparison("K=4, logits, λ=0 - K=1", _norm(4, "logits"), _norm(1), "positive"),
            Comparison("K=4, losses: λ=1 - λ=0", _norm(4, kl_weight=1.0), _norm(4), "positive"),
            Comparison("K=4, λ=0: losses - logits", _norm(4), _norm(4, "logits"), "positive"),
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
