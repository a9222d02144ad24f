"""The paper's five claims, checked with the runs of a family: seen, in part, not seen, or not run.

A difference counts if the 95% confidence interval of its mean does not contain 0, and two settings
are equal if it contains 0 and nothing as large as a point (difference.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Literal

from fastaug.experiments.difference import EQUAL_WITHIN, Difference, difference
from fastaug.experiments.grids import EXPERIMENTS
from fastaug.experiments.run import AVERAGES
from fastaug.experiments.selection import Chosen, Selected

Verdict = Literal["seen", "in part", "not seen", "not run"]

AROUND_ONE = (0.5, 2.0)
"""Weights of the regularizer that count as around 1."""
MIN_SETTINGS = 4
"""Settings that make a sweep."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper with the evidence for or against it."""

    text: str
    verdict: Verdict
    evidence: tuple[str, ...]
    """Lines with differences and their spread over the seeds, or with the runs that are missing."""


def check_claims(selected: Selected) -> list[Claim]:
    """The five claims, in the paper's order."""
    claims = [
        _losses_beat_logits(selected),
        _regularizer_helps(selected),
        _regularized_are_equal(selected),
        _weight_is_flat(selected),
        _views_help_at_test_time(selected),
    ]
    one_seed = all(len(chosen.runs) == 1 for chosen in selected.chosen.values())
    return [_tempered(claim) for claim in claims] if one_seed else claims


@dataclass(frozen=True)
class PaperSweep:
    """A family that the paper's claims can be checked with."""

    selected: Selected
    claims: list[Claim]


def paper_sweeps(selected: Iterable[Selected]) -> list[PaperSweep]:
    """The families that are sweeps of one of the paper's grids, in whole or in part.

    A sweep can check a claim on training, and is one of fastaug.sweep's experiments or has at least
    four settings. Two other runs with and without the regularizer are a comparison, and test-time
    augmentation can be checked with any run.
    """
    sweeps = []
    for one in selected:
        *on_training, on_test_time = check_claims(one)
        checked = any(claim.verdict != "not run" for claim in on_training)
        if checked and (one.family.sweep in EXPERIMENTS or len(one.chosen) >= MIN_SETTINGS):
            sweeps.append(PaperSweep(one, [*on_training, on_test_time]))
    return sweeps


def _tempered(claim: Claim) -> Claim:
    """A claim as far as one seed can support it: only the sign of a difference is known."""
    if claim.verdict == "not run":
        return claim
    verdict: Verdict = "in part" if claim.verdict == "seen" else claim.verdict
    line = "one seed: the difference may be noise"
    return Claim(claim.text, verdict, (*claim.evidence, line))


def _losses_beat_logits(selected: Selected) -> Claim:
    text = (
        "Without the regularizer, averaging losses beats averaging logits, and the gap grows with K"
    )
    gaps: dict[int, Difference] = {}
    for views in selected.multiplicities:
        losses, logits = (selected.at(views, average) for average in ("losses", "logits"))
        if views > 1 and losses and logits and (gap := difference(losses, logits, "top1")):
            gaps[views] = gap
    if not gaps:
        return _not_run(text, "losses and logits at the same K > 1 with KL weight 0")
    evidence = [f"K={views}: losses - logits {gap.points()}" for views, gap in gaps.items()]
    first, last = gaps[min(gaps)], gaps[max(gaps)]
    if len(gaps) == 1:
        evidence.append("only one K > 1: unknown whether the gap grows")
    grows = len(gaps) > 1 and last.mean > first.mean
    return Claim(text, _verdict(last.is_gain, grows), tuple(evidence))


def _regularizer_helps(selected: Selected) -> Claim:
    text = (
        "The regularizer improves the accuracy of the central crop and lowers the invariance "
        "measure, for all three objectives"
    )
    views = selected.largest_k
    evidence, found = [], []
    for average in AVERAGES:
        plain, regularized = (selected.at_weight(views, average, weight) for weight in (0, 1))
        if views == 1 or not (plain and regularized):
            continue
        top1 = difference(regularized, plain, "top1")
        invariance = difference(regularized, plain, "invariance")
        if top1 and invariance:
            evidence.append(
                f"K={views}, average {average}: top-1 {top1.points()}, "
                f"invariance {invariance.nats()}"
            )
            found += [top1.is_gain, invariance.is_loss]
    if not found:
        return _not_run(text, "an objective at the same K > 1 with KL weights 0 and 1")
    missing = _missing(len(evidence))
    return Claim(text, _verdict(*found, not missing), tuple(evidence + missing))


def _regularized_are_equal(selected: Selected) -> Claim:
    text = "With the regularizer the three objectives are equally accurate, within a point"
    views = selected.largest_k
    chosen = {a: c for a in AVERAGES if (c := selected.at_weight(views, a, 1)) is not None}
    if views == 1 or len(chosen) < 2:
        return _not_run(text, "two objectives at the same K > 1 with KL weight 1")
    pairs = {
        f"K={views}: {one} - {other}": gap
        for one, other in combinations(chosen, 2)
        if (gap := difference(chosen[one], chosen[other], "top1"))
    }
    evidence = [f"{name} {gap.points()}" for name, gap in pairs.items()]
    regularized = _range(chosen.values())
    plain = _range(c for a in AVERAGES if (c := selected.at(views, a)) is not None)
    evidence.append(
        f"range of the means: {100 * regularized:.1f} points with the regularizer, "
        f"{100 * plain:.1f} without"
    )
    missing = _missing(len(chosen))
    verdict: Verdict = "in part"
    if any(gap.is_clear and gap.seeds > 1 for gap in pairs.values()):
        verdict = "in part" if regularized < plain / 2 else "not seen"
    elif all(_is_equal(gap) for gap in pairs.values()) and not missing:
        verdict = "seen"
    return Claim(text, verdict, tuple(evidence + missing))


def _weight_is_flat(selected: Selected) -> Claim:
    low, high = AROUND_ONE
    around = f"around 1 ({low:g} to {high:g}), within a point"
    text = f"Accuracy is flat in the KL weight {around}, and lower at 0"
    views = selected.largest_k
    weights = {
        setting.kl_weight: chosen
        for setting, chosen in selected.chosen.items()
        if setting.augmented and setting.views == views and setting.average == "losses"
    }
    near = [weight for weight in sorted(weights) if low <= weight <= high and weight != 1]
    if not {0.0, 1.0} <= weights.keys() or not near:
        return _not_run(text, "average losses with KL weights 0, 1 and others from 0.5 to 2")
    gaps = {weight: difference(chosen, weights[1.0], "top1") for weight, chosen in weights.items()}
    evidence = tuple(
        f"K={views}: weight {weight:g} - weight 1 {gap.points()}"
        for weight, gap in sorted(gaps.items())
        if gap and weight != 1
    )
    at_zero = gaps[0.0]
    flat = all(_is_equal(gap) for weight, gap in gaps.items() if weight in near)
    return Claim(text, _verdict(flat, at_zero is not None and at_zero.is_loss), evidence)


def _views_help_at_test_time(selected: Selected) -> Claim:
    text = "Test-time augmentation improves on the central crop"
    gains = {
        setting: gain
        for setting, chosen in selected.chosen.items()
        if (gain := difference(chosen, chosen, "tta_top1", "top1"))
    }
    if not gains:
        return _not_run(text, "runs with --tta > 0")
    clear = [setting for setting, gain in gains.items() if gain.is_gain]
    mean = fmean(gain.mean for gain in gains.values())
    evidence = [
        f"{100 * mean:+.1f} points on average over {len(gains)} settings, above noise in "
        f"{len(clear)} of them"
    ]
    evidence += [f"{setting.label}: {gain.points()}" for setting, gain in gains.items()]
    if len(clear) == len(gains):
        return Claim(text, "seen", tuple(evidence))
    return Claim(text, "in part" if mean > 0 and clear else "not seen", tuple(evidence))


def _is_equal(gap: Difference | None) -> bool:
    return gap is not None and gap.is_within(EQUAL_WITHIN["top1"])


def _verdict(*found: bool) -> Verdict:
    if all(found):
        return "seen"
    return "in part" if any(found) else "not seen"


def _not_run(text: str, needed: str) -> Claim:
    return Claim(text, "not run", (f"needs {needed}",))


def _missing(count: int) -> list[str]:
    """A line if fewer than three objectives can be compared."""
    return [f"{count} of 3 objectives were run"] if count < len(AVERAGES) else []


def _range(chosen: Iterable[Chosen]) -> float:
    means = [mean for choice in chosen if (mean := choice.mean("top1")) is not None]
    return max(means) - min(means) if means else 0.0
