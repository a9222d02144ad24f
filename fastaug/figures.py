"""python -m fastaug.figures: the paper's figures and tables, from finished runs."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import arg

from fastaug import cli
from fastaug.errors import ConfigError, DataError, few, printable, suggest
from fastaug.experiments.paper_figures import FIGURES, draw_figures
from fastaug.experiments.plotting import Drawn
from fastaug.experiments.report_format import counted
from fastaug.experiments.results import find_results
from fastaug.experiments.selection import RunsFlag, Selected, SelectOnFlag, select_families
from fastaug.experiments.tables import TABLES, Table, paper_tables
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.folder_files import check_real_folder
from fastaug.settings import Settings

_ONLY = f"Figures: {', '.join(FIGURES)}; tables: {', '.join(TABLES)}; default: all."


@dataclass(frozen=True)
class FiguresConfig(Settings):
    """Draw the paper's figures and write its tables, from finished runs."""

    runs: RunsFlag
    out: str = ""
    """Folder to write to; default: figures/ in the first of RUNS."""
    select_on: SelectOnFlag = "auto"
    only: Annotated[tuple[str, ...], arg(metavar="NAME", help=_ONLY)] = ()
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.runs:
            raise ConfigError("no RUNS given; give run folders or folders above run folders")
        for name in self.only:
            if name not in (names := (*FIGURES, *TABLES)):
                raise ConfigError(f"--only {name}: no such figure or table; {suggest(name, names)}")


def main(args: Sequence[str]) -> int:
    config = cli.parse(FiguresConfig, args, prog="python -m fastaug.figures")
    results = find_results(config.runs)
    selected = select_families(results, config.select_on)
    left_out = few(results.without_result, show=lambda one: f"{one.folder} ({one.reason})")
    if not selected and set(config.only) != {"toy"}:  # it is not drawn from runs
        where, found = ", ".join(config.runs), f" (only {left_out})" if left_out else ""
        raise DataError(f"{where}: no finished run{found}; figures need finished runs")
    if left_out:
        print(printable(f"{counted(len(results.without_result), 'run')} left out: {left_out}"))
    out = Path(config.out or Path(config.runs[0]) / "figures").expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not config.out:
            check_real_folder(out)  # a link in a stranger's folder would lead elsewhere
        files = make_files(selected, config.only or (*FIGURES, *TABLES))
        for name, content in files.items():
            with atomic_write(out / name) as temporary:
                temporary.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    print("\n".join(printable(str(out / name)) for name in files) or "nothing was written")
    return 0


def make_files(selected: Sequence[Selected], wanted: Sequence[str]) -> dict[str, bytes]:
    """Contents of the files by name; figures.md shows all figures and tables."""
    files: dict[str, bytes] = {}
    page, notes = [], defaultdict(list)
    tables = (table for table in paper_tables(selected) if table.name in wanted)
    everything: Iterator[Drawn | Table] = chain(draw_figures(selected, wanted), tables)
    with Console(stderr=True).status("drawing") as status:
        for made in everything:
            status.update(printable(f"drawn: {made.name}"))
            found = made.files()
            for note in made.notes:
                notes[note if found else f"not drawn: {note}"].append(made.name)
            files |= found
            page += [made.markdown()] if found else []
    for note, names in notes.items():
        print(printable(f"{few(names)}: {note}"))
    return {**files, "figures.md": "\n".join(page).encode()} if page else files


if __name__ == "__main__":
    sys.exit(cli.run(main))
