"""Steps with a non-finite loss or gradient: skipped, counted, logged; too many end the run.

The learner skips them on the device. The host reads the outcome of a step when the next one is
under way, so that it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastaug.errors import NonFiniteError, few
from fastaug.kernels.objective import ObjectiveTerms
from fastaug.runtime.distributed import Group


class Part(NamedTuple):
    """What is kept of a part of a step on this rank. Not its views: they are made again."""

    images: Tensor
    """[B] int64, indices in the data set."""
    labels: Tensor
    terms: ObjectiveTerms


KEPT_IMAGES = 256
"""Images of a skipped batch that are kept for inspection, over all ranks."""


class NonFiniteStep(NamedTuple):
    """A step that was skipped, over all ranks."""

    step: int
    """Its number, from 1."""
    images: list[int]
    """All images of the step."""
    culprits: list[int]
    """Images whose own loss is non-finite; none if only the gradient is."""

    def reason(self, where: Callable[[int], str]) -> str:
        """where: the file of an image, by its index."""
        if self.culprits:
            first = where(self.culprits[0])
            return f"non-finite loss for image {few(self.culprits, 8)} (the first is {first})"
        return f"non-finite gradient in the batch of images {few(self.images, 8)}"


class NonFiniteGuard:
    """Every rank passes every step; each rank comes to the same conclusion."""

    def __init__(
        self,
        limit: int,
        group: Group,
        *,
        where: Callable[[int], str],
        report: Callable[[NonFiniteStep], None],
        views: Callable[[int, Tensor], Tensor | None],
        keep: Callable[[dict[str, Any]], object],
    ) -> None:
        """where: the file of an image, by its index; report: called for each skipped step; views:
        makes the views of images of a step again; keep: writes the first skipped batch and returns
        its file."""
        self._limit, self._group = limit, group
        self._where, self._report, self._views, self._keep = where, report, views, keep
        self._count = 0
        self._in_a_row: list[NonFiniteStep] = []
        self._first: dict[str, Any] = {}
        """This rank's part of the first bad batch in the row."""
        self._pending: tuple[int, Tensor, torch.cuda.Event | None, list[Part]] | None = None

    @property
    def count(self) -> int:
        """Steps skipped so far, including the last one."""
        return self._count + (self._pending is not None and self._is_bad())

    @count.setter
    def count(self, value: int) -> None:
        self._count = value

    def add(self, step: int, bad: Tensor, parts: list[Part]) -> None:
        """Add a step, numbered from 1: whether it was skipped, and its parts on this rank. The step
        before has been checked."""
        # Copied now and read a step later: by then the device has long been there.
        event = None
        if bad.is_cuda:
            stream = torch.cuda.current_stream(bad.device)
            bad = bad.to("cpu", non_blocking=True)
            event = stream.record_event()
        self._pending = step, bad, event, parts

    def check(self) -> None:
        """Read the outcome of the step that was added last; all ranks together."""
        if self._pending is None:
            return
        is_bad, (step, _, _, parts) = self._is_bad(), self._pending
        self._pending = None
        if not is_bad:
            self._in_a_row.clear()
            return
        self._count += 1
        own = _describe(parts)
        ranks = self._group.gather({name: own[name].tolist() for name in ("images", "culprits")})
        known = {name: [i for rank in ranks for i in rank[name]] for name in ranks[0]}
        found = NonFiniteStep(step, **known)
        if not self._in_a_row:
            self._first = own
        self._in_a_row.append(found)
        self._report(found)
        if len(self._in_a_row) >= self._limit:
            raise self._error()

    def _is_bad(self) -> bool:
        assert self._pending is not None
        _, bad, event, _ = self._pending
        if event is not None:
            event.synchronize()
        return bool(bad)

    def _error(self) -> NonFiniteError:
        first, count = self._in_a_row[0], len(self._in_a_row)
        share = -(-KEPT_IMAGES // self._group.ranks)
        own = {name: value[:share] for name, value in self._first.items()}
        if (views := self._views(first.step, own["images"])) is not None:
            own["views"] = views
        parts = self._group.gather(own)
        known = [name for name in parts[0] if all(name in part for part in parts)]
        kept = {name: torch.cat([part[name] for part in parts]) for name in known}
        file = self._keep({"step": first.step, **kept})
        return NonFiniteError(
            f"skipped {count} consecutive steps (--max-bad-steps), starting with step "
            f"{first.step:,}: {first.reason(self._where)}; saved that batch as {file}; start "
            "again with a lower --lr or with --precision fp32, or fix the images and --resume (the "
            "weights are those before that step)"
        )


def _describe(parts: list[Part]) -> dict[str, Tensor]:
    """A step's images on this rank, the culprits first."""
    images = torch.cat([part.images.cpu() for part in parts])
    labels = torch.cat([part.labels.cpu() for part in parts])
    nll = torch.cat([part.terms.nll for part in parts]).cpu()
    kl = torch.cat([part.terms.kl for part in parts]).cpu()
    good = nll.isfinite() & kl.isfinite()
    order = good.to(torch.int8).argsort(stable=True)
    return {
        "images": images[order],
        "culprits": images[~good],
        "labels": labels[order],
        "nll": nll[order],
        "kl": kl[order],
    }
