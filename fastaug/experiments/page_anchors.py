"""Names of the page's parts. Both ends of every link come from here."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence

from fastaug.errors import printable
from fastaug.experiments.results import Family, Run, Setting


class Anchors:
    """Made of names and not of places in a list, so that a link into an older page of the same
    runs still leads there. What belongs to a family follows an underscore, which no name has."""

    def __init__(self, families: Sequence[Family]) -> None:
        runs = [run for family in families for run in family.runs]
        parents = [str(run.folder.absolute().parent) for run in runs]
        self._top = os.path.commonpath(parents) if parents else ""
        self._taken: set[str] = set()
        self._parts: dict[tuple[str, str], str] = {}
        self._families = {
            family.title: self._unique(f"family-{_plain(family.slug)}") for family in families
        }
        self._slugs = {family.slug: self._families[family.title] for family in families}
        self._runs = {run.folder: self._unique(f"run-{self._digest(run)}") for run in runs}

    def family(self, family: Family) -> str:
        return self._families[family.title]

    def setting(self, family: Family, setting: Setting) -> str:
        """A row of the family's table of settings."""
        return f"{self.family(family)}_{_setting_name(setting)}"

    def runs_of(self, family: Family, setting: Setting) -> str:
        """The sections of all runs of a setting."""
        return f"{self.setting(family, setting)}_runs"

    def run(self, run: Run) -> str:
        return self._runs[run.folder]

    def views(self, family: Family, run: Run) -> str:
        """The picture of the views; all runs of a family with as many views of a kind share it."""
        return f"{self.family(family)}_views-{run.config.view.views}-{run.config.view.augment}"

    def part(self, kind: str, name: str) -> str:
        """Of a figure or table, which go by names of their own."""
        if (kind, name) not in self._parts:
            self._parts[kind, name] = self._unique(f"{kind}-{_plain(name)}")
        return self._parts[kind, name]

    def of_figure(self, name: str) -> str:
        """The family that a figure is of, whose slug ends its name; empty: of no single one."""
        matching = [slug for slug in self._slugs if name.endswith(f"-{slug}")]
        return self._slugs[max(matching, key=len)] if matching else ""

    def name(self, run: Run) -> str:
        """A run's folder, without what all runs' folders begin with."""
        return printable(os.path.relpath(run.folder.absolute(), self._top))

    def _digest(self, run: Run) -> str:
        return hashlib.sha256(self.name(run).encode()).hexdigest()[:10]

    def _unique(self, wanted: str) -> str:
        found, times = wanted, 1
        while found in self._taken:
            times += 1
            found = f"{wanted}-{times}"
        self._taken.add(found)
        return found


def _setting_name(setting: Setting) -> str:
    if not setting.augmented:
        return "no-augmentation"
    # Equal settings have one name, whether somebody wrote 1 or 1.0.
    return f"k{setting.views:g}-{setting.average}-kl{float(setting.kl_weight)!r}"


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"
