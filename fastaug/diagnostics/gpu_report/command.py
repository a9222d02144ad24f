"""fastaug.doctor --gpu-report: which parts, where the files go, and one screen at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

import fastaug
from fastaug.diagnostics.gpu_report import parts as all_parts
from fastaug.diagnostics.gpu_report.page import write_page
from fastaug.diagnostics.gpu_report.recorder import is_stand_in
from fastaug.diagnostics.gpu_report.results import GpuReport, PartResult
from fastaug.diagnostics.gpu_report.runner import Part, run_parts
from fastaug.diagnostics.gpu_report.scrub import scrub
from fastaug.errors import ConfigError, printable, suggest
from fastaug.runs.console import show_table
from fastaug.runtime.atomic import atomic_write, write_json

NAME = "gpu-report"
"""Stem of the files, where --gpu-report names none."""


class Files(NamedTuple):
    html: Path
    json: Path


def make_gpu_report(named: str, wanted: str, *, quick: bool) -> int:
    """Run the parts, write both files after each, and return the exit code.

    named: the file or folder of --gpu-report; wanted: the names of --parts, "" for all.
    """
    parts = choose_parts(wanted)
    files = output_files(named)
    if not torch.cuda.is_available():
        raise ConfigError(
            "--gpu-report: torch finds no GPU here; python -m fastaug.doctor says why"
        )
    report = _new_report(quick)
    for gpu in report.gpus:
        print(f"GPU: {gpu}")
    preload = (all_parts.__name__,)
    for result in run_parts(parts, quick=quick, preload=preload, say=_say):
        report = replace(report, parts=(*report.parts, _scrubbed(result)))
        _write(files, report)
    interrupted = any("interrupted" in part.detail for part in report.parts)
    report = replace(report, complete=not interrupted)
    _write(files, report)
    _show(report, files)
    return 130 if interrupted else int(report.failed)


def choose_parts(wanted: str) -> Mapping[str, Part]:
    """The parts of a comma-separated list; all for ""."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in all_parts.PARTS:
            hint = suggest(name, all_parts.PARTS)
            raise ConfigError(f"--parts {wanted}: unknown part {name!r}: {hint}")
    return {name: part for name, part in all_parts.PARTS.items() if name in (names or [name])}


def output_files(named: str) -> Files:
    """Paths of the HTML and the JSON file, checked before the work starts."""
    path = Path(named).expanduser()
    if path.is_dir():
        path = path / NAME
    elif path.suffix in (".html", ".json"):
        path = path.with_suffix("")
    if not path.parent.is_dir():
        raise ConfigError(f"--gpu-report {named}: must be a folder, or a file in a folder")
    return Files(path.with_name(f"{path.name}.html"), path.with_name(f"{path.name}.json"))


def _new_report(quick: bool) -> GpuReport:
    gpus = tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    return GpuReport(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        fastaug=fastaug.__version__,
        torch=torch.__version__,
        gpus=gpus,
        stand_in=any(map(is_stand_in, gpus)),
        quick=quick,
        complete=False,
    )


def _scrubbed(part: PartResult) -> PartResult:
    """Without names of the machine in what packages and drivers have written."""
    return replace(
        part,
        detail=scrub(part.detail),
        output=scrub(part.output),
        checks=tuple(replace(check, detail=scrub(check.detail)) for check in part.checks),
        tables=tuple(
            replace(table, title=scrub(table.title), rows=scrub(table.rows))
            for table in part.tables
        ),
    )


def _write(files: Files, report: GpuReport) -> None:
    try:
        write_json(files.json, report.to_json())
        with atomic_write(files.html) as temporary:
            temporary.write_text(write_page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--gpu-report {files.json.parent}: cannot be written ({error.strerror})"
        ) from error


def _say(line: str) -> None:
    print(printable(line), flush=True)


def _show(report: GpuReport, files: Files) -> None:
    rows = [
        (part.name, part.outcome + (f": {part.reason}" if part.reason else _counts(part)))
        for part in report.parts
    ]
    title = "GPU report" + (" (stand-in GPUs: times mean nothing)" if report.stand_in else "")
    show_table(title, rows)
    print("attach these to an issue; no name of this machine or its user is in them:")
    for file in files:
        print(f"  {printable(str(file))}")


def _counts(part: PartResult) -> str:
    text = f", {part.count('passed')} of {len(part.checks)} checks"
    return text + (f", {skipped} skipped" if (skipped := part.count("skipped")) else "")
