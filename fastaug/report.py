"""python -m fastaug.report: one page about all runs below some folders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from fastaug import cli
from fastaug.errors import ConfigError, DataError, printable
from fastaug.experiments.claims import check_claims
from fastaug.experiments.page import gather, write_page
from fastaug.experiments.page_values import counted, size_text
from fastaug.experiments.results import Results, find_results
from fastaug.experiments.selection import Selected, select_families
from fastaug.experiments.show_config import ReportConfig
from fastaug.runtime.atomic import atomic_write

_LINES = 5
"""Of the evidence of a claim; the page has all."""


def main(args: Sequence[str]) -> int:
    config = cli.parse(ReportConfig, args, prog="python -m fastaug.report")
    results = find_results(config.runs)
    out = cli.output_file("--out", config.out or str(Path(config.runs[0]) / "report.html"))
    if not results.families:
        raise DataError(_nothing(config, results))
    selected = select_families(results, config.select_on)
    content = gather(config.runs, results, selected, made=datetime.now().astimezone())
    # Names of folders may be no UTF-8.
    page = write_page(content).encode(errors="backslashreplace")
    try:
        with atomic_write(out) as temporary:
            temporary.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    show_claims(selected)
    runs = sum(len(family.runs) for family in results.families)
    left_out = f" ({len(results.unfinished)} unfinished)" if results.unfinished else ""
    print(printable(f"{counted(runs, 'run', 'runs')}{left_out}: {out} ({size_text(len(page))})"))
    return 0


def show_claims(selected: Sequence[Selected]) -> None:
    """Each claim of the paper, and whether these runs show it, in families that can."""
    for one in selected:
        claims = check_claims(one)
        if all(claim.verdict == "not run" for claim in claims):
            continue
        print(printable(f"{one.family.title} (mean ± standard error over the seeds [all of them])"))
        for claim in claims:
            print(f"  {claim.verdict.upper():8} {claim.text}")
            for line in claim.evidence[:_LINES]:
                print(f"           {line}")


def _nothing(config: ReportConfig, results: Results) -> str:
    """What was found in place of a finished run."""
    where = ", ".join(config.runs)
    if not results.unfinished:
        return f"{where}: no run folder in it; give --out of a training, or a folder above some"
    first = results.unfinished[0]
    return (
        f"{where}: no finished run among {len(results.unfinished)}; {first.folder}: {first.reason}"
    )


if __name__ == "__main__":
    sys.exit(cli.run(main))
