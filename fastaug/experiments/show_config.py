"""The flags of the commands that show results, with every check of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from fastaug.errors import ConfigError, suggest
from fastaug.experiments.gallery import FIGURES
from fastaug.experiments.selection import SelectOn
from fastaug.experiments.tables import TABLES
from fastaug.settings import Settings


@dataclass(frozen=True)
class FiguresConfig(Settings):
    """Draw the paper's figures and write its tables, from runs that have finished."""

    runs: Annotated[tuple[str, ...], arg(metavar="RUNS...")]
    """Run folders, or folders that hold some, at any depth."""
    out: str = ""
    """Folder to write to; default: figures/ in the first of RUNS."""
    select_on: SelectOn = "auto"
    """Which images choose each setting's learning rate and epochs, by top-1. auto: the held-out
    ones where every run of a family has some, else the test images, as in the paper."""
    only: Annotated[tuple[str, ...], arg(metavar="NAME")] = ()
    """What to make: toy, accuracy, invariance, kl-weight, test-views, extended, randaugment,
    capacity, results, appendix, chosen; default: all. The last three are tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.runs:
            raise ConfigError("no RUNS given; give run folders, or folders that hold some")
        for name in self.only:
            if name not in (names := (*FIGURES, *TABLES)):
                raise ConfigError(f"--only {name}: no such figure or table; {suggest(name, names)}")


@dataclass(frozen=True)
class ReportConfig(Settings):
    """Write one page about runs: claims of the paper, settings, figures, tables, every run."""

    runs: Annotated[tuple[str, ...], arg(metavar="RUNS...")]
    """Run folders, or folders that hold some, at any depth."""
    out: str = ""
    """File to write; default: report.html in the first of RUNS."""
    select_on: SelectOn = "auto"
    """Which images choose each setting's learning rate and epochs, by top-1. auto: the held-out
    ones where every run of a family has some, else the test images, as in the paper."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.runs:
            raise ConfigError("no RUNS given; give run folders, or folders that hold some")
