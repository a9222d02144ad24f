"""python -m fastaug.report: one page about all runs below some folders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fastaug import cli
from fastaug.errors import ConfigError, DataError, printable
from fastaug.experiments.claims import check_claims
from fastaug.experiments.report_format import counted
from fastaug.experiments.report_page import write_page
from fastaug.experiments.results import find_results
from fastaug.experiments.selection import RunsFlag, Selected, SelectOnFlag, select_families
from fastaug.runtime.atomic import atomic_write
from fastaug.settings import Settings

_MAX_EVIDENCE = 5
"""Lines of evidence that the console shows for a claim; the page has all."""


@dataclass(frozen=True)
class ReportConfig(Settings):
    """Write one page about runs: claims of the paper, settings, figures, tables, every run."""

    runs: RunsFlag
    out: str = ""
    """File to write; default: report.html in the first of RUNS."""
    select_on: SelectOnFlag = "auto"
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.runs:
            raise ConfigError("no RUNS given; give run folders, or folders that hold some")


def main(args: Sequence[str]) -> int:
    config = cli.parse(ReportConfig, args, prog="python -m fastaug.report")
    results = find_results(config.runs)
    out = cli.output_file("--out", config.out or str(Path(config.runs[0]) / "report.html"))
    where, unfinished = ", ".join(config.runs), results.unfinished
    if not results.families and not unfinished:
        raise DataError(f"{where}: no run folder found; give a training's --out or a folder above")
    if not results.families:
        first = f"{unfinished[0].folder}: {unfinished[0].reason}"
        raise DataError(f"{where}: no finished run among {len(unfinished)}; {first}")
    selected = select_families(results, config.select_on)
    page = write_page(config.runs, results, selected, made=datetime.now().astimezone())
    content = page.encode(errors="backslashreplace")  # folder names may not be UTF-8
    try:
        with atomic_write(out) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    show_claims(selected)
    runs = counted(sum(len(family.runs) for family in results.families), "run")
    left_out = f" ({len(unfinished)} unfinished)" if unfinished else ""
    kilobytes = len(content) / 1000
    size = f"{kilobytes:.0f} kB" if kilobytes < 1000 else f"{kilobytes / 1000:.1f} MB"
    print(printable(f"{runs}{left_out}: {out} ({size})"))
    return 0


def show_claims(selected: Sequence[Selected]) -> None:
    """Print the paper's claims and their verdicts, for families that can be checked."""
    for one in selected:
        claims = check_claims(one)
        if all(claim.verdict == "not run" for claim in claims):
            continue
        print(printable(f"{one.family.title} (mean ± standard error over the seeds [all of them])"))
        for claim in claims:
            print(f"  {claim.verdict.upper():8} {claim.text}")
            for line in claim.evidence[:_MAX_EVIDENCE]:
                print(f"           {line}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
