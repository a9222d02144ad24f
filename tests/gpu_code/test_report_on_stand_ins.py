"""python -m fastaug.doctor --gpu-report on stand-in GPUs: it ends, and says what it has found."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from report_page import check_page
from stand_ins import ROOT, run_on_stand_ins

COMMAND = [sys.executable, "-m", "fastaug.doctor", "--gpu-report"]
ENDED = {"passed", "failed", "skipped"}


def run(out: Path, *flags: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, str(out), "--quick", *flags]
    return run_on_stand_ins(command, devices=2, functional=True, **settings)


def read(out: Path) -> dict[str, Any]:
    """The JSON file, after a look at what is in it."""
    content = json.loads((out / "gpu-report.json").read_text())
    assert (content["schema"], content["schema_version"]) == ("fastaug GPU report", 1)
    assert content["gpus"] == ["Null GPU", "Null GPU"]
    assert content["stand_in"] is content["quick"] is content["complete"] is True
    for part in content["parts"]:
        assert part["outcome"] in ENDED
        assert {check["outcome"] for check in part["checks"]} <= ENDED
        for table in part["tables"]:
            assert all(len(row) == len(table["columns"]) for row in table["rows"])
    return {part["name"]: part for part in content["parts"]}


def test_all_parts_end_and_the_files_can_be_sent_to_anyone(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    parts = read(tmp_path)
    outcomes = {name: part["outcome"] for name, part in parts.items()}
    no_real_gpu = {"launches", "sanitizer"}
    assert outcomes == {name: "skipped" if name in no_real_gpu else "passed" for name in outcomes}
    assert {*no_real_gpu, "machine", "admission", "training", "two-gpus"} <= set(outcomes)
    assert all(re.search(rf"^\[\d+/12\] {name}: ", done.stdout, re.MULTILINE) for name in outcomes)
    curves = {row[0]: row for table in parts["training"]["tables"] for row in table["rows"]}
    assert curves["fp32"][1:] == curves["CPU, fp32"][1:]
    throughput = {table["name"]: table["rows"] for table in parts["throughput"]["tables"]}
    assert [row[0] for row in throughput["throughput"]] == [1, 2]
    page = (tmp_path / "gpu-report.html").read_text()
    text = check_page(page).text
    assert "Not a real GPU" in text
    names = {socket.gethostname(), getpass.getuser(), str(tmp_path), str(ROOT), str(Path.home())}
    for content in (page, (tmp_path / "gpu-report.json").read_text()):
        assert [name for name in names - {"root", "/"} if name in content] == []
        assert not re.search(r"(?<![\w.<:/])/(usr|home|tmp|root|opt|var)/", content)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "gpu-report.html",
        "gpu-report.json",
    ]


def test_a_kernel_that_faults_costs_its_part_only(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts", "kernel-cuda,kernel-triton", fault="objective_losses")
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    parts = read(tmp_path)
    assert parts["kernel-cuda"]["outcome"] == "failed"
    first, *others = parts["kernel-cuda"]["checks"]
    assert first["outcome"] == "failed"
    assert "700" in first["detail"] or "illegal" in first["detail"]
    assert {check["outcome"] for check in others} == {"skipped"}, "the GPU is lost to the process"
    assert parts["kernel-triton"]["outcome"] == "passed"
