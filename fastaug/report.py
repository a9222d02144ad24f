"""python -m fastaug.report: compare runs in the terminal and on one HTML page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fastaug import cli
from fastaug.errors import ConfigError, DataError, printable
from fastaug.experiments.claims import paper_sweeps
from fastaug.experiments.comparison import compare
from fastaug.experiments.record import write_record
from fastaug.experiments.report_console import show_claims, show_comparison
from fastaug.experiments.report_format import counted
from fastaug.experiments.report_page import write_page
from fastaug.experiments.results import Results, find_results
from fastaug.experiments.selection import RunsFlag, SelectOnFlag, select_families
from fastaug.runtime.atomic import atomic_write
from fastaug.settings import Settings


@dataclass(frozen=True)
class ReportConfig(Settings):
    """Compare runs, also stopped and running ones: a table here, and one HTML page with settings,
    curves and views, and with the paper's claims, figures and tables for sweeps of its grids."""

    runs: RunsFlag
    out: str = ""
    """File to write; default: report.html in the first of RUNS."""
    select_on: SelectOnFlag = "auto"
    record: str = ""
    """Folder to also write the finished runs to, as small files that can be committed: settings and
    measures (runs.csv), training curves (curves.csv). fastaug.report, fastaug.figures and
    fastaug.sweep --reuse read it like the runs themselves."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.runs:
            raise ConfigError("no RUNS given; give run folders or folders above run folders")


def main(args: Sequence[str]) -> int:
    config = cli.parse(ReportConfig, args, prog="python -m fastaug.report")
    results = find_results(config.runs)
    out = cli.output_file("--out", config.out or str(Path(config.runs[0]) / "report.html"))
    where, skipped = ", ".join(config.runs), results.skipped
    if not results.runs and not skipped:
        raise DataError(f"{where}: no run folder found; give a training's --out or a folder above")
    if not results.runs:
        first = f"{skipped[0].folder}: {skipped[0].reason}"
        raise DataError(f"{where}: none of {len(skipped)} run folders can be read; {first}")
    comparison = compare(results.runs)
    sweeps = paper_sweeps(select_families(results, config.select_on))
    made = datetime.now().astimezone()
    page = write_page(config.runs, results, comparison, sweeps, made)
    content = page.encode(errors="backslashreplace")  # folder names may not be UTF-8
    try:
        with atomic_write(out) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    recorded = _write_record(config.record, results)
    show_comparison(comparison, skipped)
    show_claims(sweeps)
    kilobytes = len(content) / 1000
    size = f"{kilobytes:.0f} kB" if kilobytes < 1000 else f"{kilobytes / 1000:.1f} MB"
    print(printable(f"curves and all settings: {out} ({size})"))
    if config.record:
        print(printable(f"record of {counted(recorded, 'finished run')}: {config.record}"))
    return 0


def _write_record(folder: str, results: Results) -> int:
    """Write the record of --record, if it is given; returns its number of runs."""
    if not folder:
        return 0
    try:
        return write_record(Path(folder).expanduser(), results.runs)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--record {folder}: cannot be written ({reason})") from error


if __name__ == "__main__":
    sys.exit(cli.run(main))
