"""Ids of the report's parts, for both ends of every link."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from fastaug.experiments.comparison import config_text
from fastaug.experiments.results import Family, slug_of
from fastaug.experiments.run import Run, Setting


class Anchors:
    """Ids are made of names, not of positions in a list, so that a link into an older page of the
    same runs still works. An underscore, which no slug has, follows the family's part."""

    def __init__(self, runs: Sequence[Run]) -> None:
        parents = [str(run.folder.absolute().parent) for run in runs]
        self._top = os.path.commonpath(parents) if parents else ""

    def run(self, run: Run) -> str:
        relative = os.path.relpath(run.folder.absolute(), self._top)
        return f"run-{hashlib.sha256(os.fsencode(relative)).hexdigest()[:10]}"

    def views(self, run: Run) -> str:
        """The picture of the views; runs with the same data and the same kind of views share it."""
        view, data = run.config.view, slug_of(config_text(run, "data"))
        return f"views-{data}-{view.views}-{view.augment}"

    def family(self, family: Family) -> str:
        return f"family-{family.slug}"

    def setting(self, family: Family, setting: Setting) -> str:
        """A row of the family's table of settings."""
        name = "no-augmentation"
        if setting.augmented:
            # float: 1 and 1.0 are the same weight.
            name = f"k{setting.views:g}-{setting.average}-kl{float(setting.kl_weight)!r}"
        return f"{self.family(family)}_{name}"
