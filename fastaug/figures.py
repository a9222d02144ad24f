"""python -m fastaug.figures: the paper's figures and tables, from the runs below some folders."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fastaug import cli
from fastaug.errors import ConfigError, printable
from fastaug.experiments.figure_style import render
from fastaug.experiments.gallery import FIGURES, Drawn, draw
from fastaug.experiments.results import Results, find_results
from fastaug.experiments.selection import Selected, select_families
from fastaug.experiments.show_config import FiguresConfig
from fastaug.experiments.tables import Table, paper_tables
from fastaug.runtime.atomic import atomic_write

_FIRST = 3
"""Names in a line, at most."""


def main(args: Sequence[str]) -> int:
    config = cli.parse(FiguresConfig, args, prog="python -m fastaug.figures")
    results = find_results(config.runs)
    selected = select_families(results, config.select_on)
    _say_what_was_found(config, results)
    out = Path(config.out or Path(config.runs[0]) / "figures").expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = _write(out, selected, config.only)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    print("\n".join(printable(str(file)) for file in written) or "nothing was written")
    return 0


def _write(out: Path, selected: Sequence[Selected], only: Sequence[str]) -> list[Path]:
    """The files, in the order of the page that shows them all."""
    files: dict[str, bytes] = {}
    page: list[str] = []
    notes: defaultdict[str, list[str]] = defaultdict(list)
    kinds = [name for name in FIGURES if not only or name in only]
    with Console(stderr=True).status("drawing") as status:
        for drawn in draw(selected, kinds) if kinds else ():
            status.update(printable(f"drawn: {drawn.name}"))
            for note in drawn.notes:
                notes[note if drawn.figure else f"not drawn: {note}"].append(drawn.name)
            if drawn.figure is not None:
                files[f"{drawn.name}.png"] = render(drawn.figure, "png")
                files[f"{drawn.name}.svg"] = render(drawn.figure, "svg")
                page.append(_section(drawn))
    for table in _tables(selected, only):
        for note in table.notes:
            notes[note].append(table.name)
        files[f"{table.name}.md"] = table.markdown().encode()
        files[f"{table.name}.tex"] = table.latex().encode()
        page.append(table.markdown())
    for note, names in notes.items():
        print(printable(f"{_few(names)}: {note}"))
    if page:
        files["figures.md"] = "\n".join(page).encode()
    for name, content in files.items():
        with atomic_write(out / name) as temporary:
            temporary.write_bytes(content)
    return [out / name for name in files]


def _tables(selected: Sequence[Selected], only: Sequence[str]) -> list[Table]:
    return [table for table in paper_tables(selected) if not only or table.name in only]


def _section(drawn: Drawn) -> str:
    notes = "".join(f"\n- {note}" for note in drawn.notes)
    text = f"### {drawn.title}\n\n![]({drawn.name}.png)\n\n{drawn.caption}\n"
    return "\n".join(map(printable, f"{text}{notes}".split("\n"))) + "\n"


def _say_what_was_found(config: FiguresConfig, results: Results) -> None:
    if not results.families:
        where = ", ".join(config.runs)
        print(printable(f"{where}: no finished run in it; the toy example is all that is drawn"))
    if count := len(results.unfinished):
        left_out = [f"{one.folder} ({one.reason})" for one in results.unfinished]
        print(printable(f"{count} run{'s' * (count > 1)} left out: {_few(left_out)}"))


def _few(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _FIRST} more"] if len(names) > _FIRST else []
    return ", ".join([*names[:_FIRST], *more])


if __name__ == "__main__":
    sys.exit(cli.run(main))
