"""Reports on strangers' run folders: no traceback, no hang, bounded memory, good runs are shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hostile_runs import CASES, FILES, PLACES, VALUES, write_hostile, write_random
from run_folders import write_sweep

HELPER = Path(__file__).parents[1] / "helpers/report_hostile.py"
SECONDS = 300
"""For all folders; they take 30 on one core."""
FILE_CASES = [name for name in CASES if name.startswith(FILES)]
VALUE_CASES = [name for name in CASES if name not in FILE_CASES]
RANDOM = 100

SKIPPED = {f"{file}, {name}" for file in ("config.json", "summary.json") for name in PLACES}
SKIPPED -= {"config.json, folder"}  # which makes no run folder
"""Runs that have nothing to show: the page lists them with a reason."""
NOTED = {f"metrics.jsonl, {name}" for name in PLACES | dict.fromkeys(("numbers", "NUL"))}
NOTED -= {"metrics.jsonl, empty file"}
# The only line of these files has no end, as that of a process that was killed.
TORN = {"bytes", "UTF-16", "list", "nesting", "nested objects", "long number", "many keys"}
NOTED -= {f"metrics.jsonl, {name}" for name in TORN}
"""Runs whose metrics.jsonl is not a file, or has lines that are not records: the page says so."""


def folder_name(case: str) -> str:
    return re.sub(r"[^\w.-]", "-", case)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What report and figures print about a sweep among more than 300 hostile folders."""
    top = tmp_path_factory.mktemp("hostile")
    folders = [top / "report", top / "figures"]
    for folder in folders:
        folder.mkdir()
        write_sweep(folder)
        for name in FILE_CASES + VALUE_CASES[:: len(VALUES) // 3]:
            write_hostile(folder / folder_name(name), CASES[name])
        write_random(folder / "random", RANDOM, seed=1)
    done = subprocess.run(
        [sys.executable, str(HELPER), *map(str, folders)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{len(found)}: {done.returncode} {done.stderr[-2000:]}"
    page = (folders[0] / "report.html").read_text(encoding="utf-8")
    return {Path(one["folder"]).name: one | {"page": page} for one in found}


@pytest.mark.parametrize("command", ["report", "figures"])
def test_good_runs_are_shown(command: str, outcome: dict[str, dict[str, Any]]) -> None:
    found = outcome[command]
    assert found["code"] == 0, found["output"][-2000:]
    assert "Traceback" not in found["output"]
    assert "\x1b" not in found["output"]
    assert found["seconds"] < SECONDS


def test_bad_folders_are_listed_with_a_reason(outcome: dict[str, dict[str, Any]]) -> None:
    page = outcome["report"]["page"]
    head = unescape(page[: page.index("<nav")])
    listed = dict(re.findall(r"<li><code>([^<]+)</code>: ([^<]+)</li>", head))
    reasons = {Path(folder).name: reason for folder, reason in listed.items()}
    missing = {name for name in SKIPPED if not reasons.get(folder_name(name))}
    assert not missing
    notes = re.findall(r"<li>([^<:]+): metrics\.jsonl: [^<]+</li>", head)
    missing = {name for name in NOTED if folder_name(name) not in notes}
    assert not missing
    for good in ("k1", "k2-plain"):
        assert f">{good}<" in page
        assert good not in reasons


def test_a_hostile_run_by_itself_is_an_error_or_a_page(tmp_path: Path) -> None:
    """One bad file of each kind, without a good neighbour: exit code 2 for what cannot be read."""
    cases = ["config.json, pipe", "summary.json, terabyte", "metrics.jsonl, endless device"]
    folders = [
        write_hostile(tmp_path / str(number) / "run", CASES[name])
        for number, name in enumerate(cases)
    ]
    done = subprocess.run(
        [sys.executable, str(HELPER), *(str(folder.parent) for folder in folders)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["code"] for one in found] == [2, 2, 0]
    for one, name in zip(found[:2], ("config.json", "summary.json"), strict=True):
        [line] = one["output"].strip().splitlines()
        assert line.startswith("error: ")
        assert name in line
