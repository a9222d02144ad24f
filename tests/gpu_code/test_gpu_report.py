"""The GPU report without a GPU: its processes, its files, and what it must not say."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import report_parts
import torch
from report_page import check_page
from torch import nn

from fastaug import cli, doctor
from fastaug.config import TrainConfig
from fastaug.diagnostics import step_model
from fastaug.diagnostics.gpu_report import prediction, sanitizer, throughput, training
from fastaug.diagnostics.gpu_report.command import choose_parts, output_files
from fastaug.diagnostics.gpu_report.launches import count_calls
from fastaug.diagnostics.gpu_report.page import write_page
from fastaug.diagnostics.gpu_report.parts import PARTS
from fastaug.diagnostics.gpu_report.recorder import Recorder, SkippedCheck, read_records
from fastaug.diagnostics.gpu_report.results import (
    CheckResult,
    GpuReport,
    PartResult,
    TableResult,
    read_report,
)
from fastaug.diagnostics.gpu_report.runner import Part, run_parts
from fastaug.diagnostics.gpu_report.scrub import scrub_text
from fastaug.errors import ConfigError
from fastaug.runtime import trace

# --- processes ---

PRELOAD = ("fastaug.train", "fastaug.pipelines.loader", "fastaug.diagnostics.gpu_report.recorder")
"""A test process has one server, which the tests with ranks use, too (ranks.py)."""


def run(*names: str, limit: float = 60.0, quick: bool = False) -> dict[str, PartResult]:
    parts = {name: Part(name, getattr(report_parts, name), 1.0, limit) for name in names}
    lines: list[str] = []
    found = run_parts(parts, quick=quick, preload=PRELOAD, say=lines.append)
    results = {result.name: result for result in found}
    assert len(lines) == 2 * sum(not r.detail.startswith("not run") for r in results.values())
    return results


def test_a_part_that_fails_or_crashes_costs_only_itself() -> None:
    found = run("fails", "raises", "crashes", "leaves", "skips", "passes")
    outcomes = {name: result.outcome for name, result in found.items()}
    assert outcomes == {
        **dict.fromkeys(("fails", "raises", "crashes", "leaves"), "failed"),
        "skips": "skipped",
        "passes": "passed",
    }
    fails = {check.name: check for check in found["fails"].checks}
    assert [check.outcome for check in fails.values()] == ["failed", "skipped", "passed"]
    assert fails["bad"].detail.endswith("RuntimeError: the reason")
    assert fails["unneeded"].detail == "needs two GPUs"
    assert found["raises"].checks[-1].detail.endswith("OSError: outside of a check")
    assert found["crashes"].detail.endswith("by SIGSEGV")
    assert "last words" in found["crashes"].output
    assert found["leaves"].detail.endswith("exit code 3")
    for name in ("raises", "crashes", "passes"):  # what was recorded before is kept
        assert found[name].checks[0] == CheckResult(
            "good", "passed", found[name].checks[0].seconds, "full"
        )
        assert found[name].tables[0].records() == [{"K": 4, "time": "nan"}]
    assert found["passes"].output == ""
    assert [found[name].reason for name in ("passes", "skips")] == [
        "",
        "unneeded: needs two GPUs",
    ]


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_hangs_meets_its_limit_with_all_it_started() -> None:
    started = time.monotonic()
    found = run("hangs", "passes", limit=3.0, quick=True)
    assert time.monotonic() - started < 60
    assert found["hangs"].outcome == "failed"
    assert "3 s" in found["hangs"].detail
    (check,) = found["hangs"].checks
    assert not is_running(check.name)
    assert found["passes"].outcome == "passed"
    assert found["passes"].checks[0].detail == "quick"


def test_an_interrupt_keeps_what_is_done() -> None:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(4, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    found = run("passes", "hangs", "fails")
    assert [part.outcome for part in found.values()] == ["passed", "skipped", "skipped"]
    assert found["hangs"].detail == "interrupted"
    assert found["fails"].detail.startswith("not run")
    assert not any(is_running(check.name) for check in found["hangs"].checks)


def test_a_truncated_line_of_a_dead_process_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.jsonl", tmp_path, quick=False)
    report_parts.passes(recorder)
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write('{"kind": "check", "na')
    found = read_records(tmp_path / "r.jsonl")
    assert [check.name for check in found.checks] == ["good"]
    assert not found.ended


# --- files ---

ROW = [4, 64, 300.0, 1200.0, 53.0, 0.0, 900.0, 1.0, 20.0, 0.1, 30.0, 2.0, 1000.0]


def report(gpu: str = "NVIDIA A100-SXM4-80GB", **changes: object) -> GpuReport:
    """A failed part, and a measurement of K = 4."""
    tables = (
        TableResult("decode", "Decoding", (("loader", ""), ("images/s", "")), [["dali", 3500.0]]),
        TableResult(
            "settings",
            "Settings",
            throughput._SETTINGS,
            [["wrn-10-1", 32, 10, "bf16", "crop-flip", "dali"]],
        ),
        TableResult("throughput", "Training", throughput._COLUMNS, [ROW]),
    )
    checks = (
        CheckResult("a <b>", "failed", 0.5, "Traceback\nValueError: <script>alert(1)</script>"),
        CheckResult("c", "skipped", 0.0, "needs \x1b[31mmore"),
    )
    settings = {"stand_in": False, "quick": False, "complete": True, **changes}
    return GpuReport(
        *("2026-01-02T03:04:05+00:00", "0.1.0", "2.14", (gpu,)),
        **settings,  # type: ignore[arg-type]
        parts=(
            PartResult("views", "checks", "failed", 3.0, "", checks, (), "printed"),
            PartResult("throughput", "speed", "passed", 9.0, "", (), tables),
        ),
    )


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report().to_json()))
    assert read_report(path, "--check") == report()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"schema": "other"}',
        json.dumps(report().to_json() | {"schema_version": 99}),
        json.dumps(report().to_json() | {"parts": [{"name": "x"}]}),
        json.dumps(report().to_json()).replace('"failed"', '"fine"'),
    ],
    ids=["no JSON", "a list", "another file", "another version", "a part", "an outcome"],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"--check .*other\.json: .+") as caught:
        read_report(path, "--check")
    assert "\n" not in str(caught.value)


def test_the_page_is_complete_and_escapes_what_others_wrote() -> None:
    page = check_page(write_page(report()))
    for text in ("<script>alert(1)</script>", r"needs \x1b[31mmore", "A100-SXM4-80GB", "K=4"):
        assert text in page.text
    assert "Not a real GPU" not in page.text
    assert "not complete" not in page.text
    other = check_page(write_page(report("Null GPU", stand_in=True, complete=False)))
    assert "Not a real GPU" in other.text
    assert "not complete" in other.text
    assert "predict.py --check" in other.text


def test_a_page_without_results() -> None:
    empty = GpuReport("now", "0", "0", (), stand_in=False, quick=True, complete=False)
    check_page(write_page(empty))


def test_names_of_the_machine_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.lab.example.org")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node17.lab.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    monkeypatch.setenv("HOME", "/home/anna")
    for given, expected in {
        'File "/home/anna/my.venv/lib/torch/x.py", line 3': 'File ".../x.py", line 3',
        "see ~/runs/one, or /tmp/a b": "see .../one, or .../a b",
        "rank 1 on node17.lab.example.org (anna@node17)": "rank 1 on HOST (USER@HOST)",
        "top-1 / top-5, 300 images/s, 4:2:0": "top-1 / top-5, 300 images/s, 4:2:0",
        "https://pytorch.org/docs/a.html": "https://pytorch.org/docs/a.html",
        "Annapurna": "Annapurna",
    }.items():
        assert scrub_text(given) == expected


# --- prediction ---


def test_a_prediction_is_set_beside_each_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sums by hand, for a network of one layer."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10, bias=False))
    work = step_model.count_work(lambda: model, views=64, size=32, precision="bf16")
    monkeypatch.setattr(step_model, "network_work", lambda *shape: work)
    found = {each.quantity: each for each in prediction.compare_prediction(report())}
    assert found["decoding"][2:] == ("images/s", 3500.0, 7000, 5000, 8000)
    assert found["decoding"].ratio == 0.5
    assert not found["decoding"].inside
    assert list(found) == [
        *("decoding", "images/s", "step", "views", "forward", "loss", "backward", "update")
    ]
    memory = 2039e9 * 0.75
    assert found["update"].predicted == pytest.approx(1e3 * 5 * 4 * 30720 / memory)
    assert found["update"].measured == 2.0
    assert found["loss"].predicted == pytest.approx(1e3 * 4 * 64 * 10 * 4 / memory)
    assert found["loss"].low > found["loss"].predicted > found["loss"].high
    assert found["images/s"].k == 4


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", None),
        ("Null GPU", None),
    ],
)
def test_gpus_that_the_model_knows(name: str, gpu: str | None) -> None:
    assert prediction.known_gpu(name) == gpu
    assert bool(prediction.why_not(report(name))) is (gpu is None)


# --- single parts ---


def test_calls_to_cuda_are_counted_inside_of_the_steps() -> None:
    def event(name: str, ts: int, cat: str = "cuda_runtime", dur: int = 1) -> dict:
        return {"name": name, "ts": ts, "dur": dur, "cat": cat}

    ranges = [event(n, t, "user_annotation", 10) for n, t in (("forward", 100), ("optimizer", 150))]
    ranges += [
        event(n, t, "user_annotation", 10) for n, t in (("forward", 200), ("optimizer", 250))
    ]
    calls = [event("cudaLaunchKernel", t) for t in (90, 101, 102, 201, 300)]
    calls += [event("cuLaunchKernelEx", 205, "cuda_driver"), event("cudaMemcpyAsync", 110)]
    calls += [event("cudaStreamSynchronize", 155), event("cudaDeviceSynchronize", 99)]
    calls += [event("sgemm", 102, "kernel")]
    found = count_calls({"traceEvents": ranges + calls})
    assert found == (2.0, 0.0, 0.5, 0.5)
    assert count_calls({"traceEvents": ranges}) is None


def test_a_curve_that_drifts_is_refused() -> None:
    right = [2.0 - 0.01 * step for step in range(40)]
    training._compared([loss * 1.0005 for loss in right], right, (1e-3, 0.05))
    with pytest.raises(AssertionError, match="first step"):
        training._compared([2.01, *right[1:]], right, (1e-3, 0.05))
    with pytest.raises(AssertionError, match="last steps"):
        training._compared([*right[:30], *[2.5] * 10], right, (1e-3, 0.05))
    with pytest.raises(AssertionError, match="39 steps"):
        training._compared(right[:-1], right, (1e-3, 0.05))
    with pytest.raises(AssertionError):
        training._compared([float("nan")] * 40, right, (1e-3, 0.05))


def test_the_sanitizer_is_started_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\necho "$@" >> $(dirname $0)/args\necho "=== ERROR SUMMARY: 0 errors"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    recorder = Recorder(tmp_path / "r.jsonl", tmp_path, quick=True)
    sanitizer.sanitizer_part(recorder)
    checks = read_records(tmp_path / "r.jsonl").checks
    assert [check.outcome for check in checks] == ["passed"] * 3
    assert checks[0].detail == "ERROR SUMMARY: 0 errors"
    lines = (tmp_path / "args").read_text().splitlines()
    assert [line.rpartition("sanitizer ")[2] for line in lines] == [
        *("loss kernel cuda", "loss kernel triton", "view engine")
    ]
    tool.write_text("#!/bin/sh\necho Invalid __global__ read\nexit 9\n")
    sanitizer.sanitizer_part(recorder)
    failed = read_records(tmp_path / "r.jsonl").checks[3:]
    assert [check.outcome for check in failed] == ["failed"] * 3
    assert "exit code 9:\nInvalid __global__ read" in failed[0].detail
    monkeypatch.setattr(sanitizer, "find_tool", lambda: None)
    sanitizer.sanitizer_part(recorder)
    assert [c.outcome for c in read_records(tmp_path / "r.jsonl").checks[6:]] == ["skipped"] * 3


def test_what_the_sanitizer_watches_ends_with_an_error_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def check(result: Exception | None) -> sanitizer.Check:
        def run() -> None:
            ran.append(result)
            if result:
                raise result

        return sanitizer.Check("one", run, quick=True)

    targets = {"good": lambda: [check(SkippedCheck("no")), check(None)]}
    targets["bad"] = lambda: [check(AssertionError("wrong"))]
    monkeypatch.setattr(sanitizer, "_targets", lambda: targets)
    assert sanitizer.main("good") == 0
    assert len(ran) == 2
    with pytest.raises(AssertionError, match="wrong"):
        sanitizer.main("bad")


def test_a_step_that_does_not_fit_into_memory_gets_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 views fit; the larger K then start there."""
    tried = []

    def measure(config: TrainConfig, *args: object) -> list:
        tried.append((config.view.views, config.optim.batch_size))
        if config.optim.batch_size > 128:
            raise torch.OutOfMemoryError
        return [config.view.views, config.optim.batch_size, *ROW[2:]]

    monkeypatch.setattr(throughput, "_measure", measure)
    monkeypatch.setattr(throughput, "_loader", lambda: "dali")
    monkeypatch.setattr(throughput, "_images", lambda *args: None)
    monkeypatch.setattr(throughput, "_batches_per_second", lambda *args: 2.0)
    throughput.throughput_part(Recorder(tmp_path / "r.jsonl", tmp_path, quick=False))
    assert tried == [(1, 256), (1, 128), (2, 128), (4, 128), (8, 128), (16, 128)]
    tables = {table.name: table.records() for table in read_records(tmp_path / "r.jsonl").tables}
    assert [row["views in a step"] for row in tables["throughput"]] == [128] * 5
    assert tables["decode"] == [{"loader": "dali", "images/s": 512.0}]


def test_ranges_can_be_given_to_another_recorder() -> None:
    names: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            names.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *_error: object) -> None: ...

    trace.trace_with(Range)
    with trace.trace_range("forward"):
        pass
    trace.stop_tracing()
    with trace.trace_range("backward"):
        pass
    assert names == ["forward"]


# --- the command ---


def test_parts_are_chosen_by_name_and_keep_their_order() -> None:
    assert list(choose_parts("")) == list(PARTS)
    assert list(choose_parts("training, decode")) == ["decode", "training"]


def test_the_files_of_a_report(tmp_path: Path) -> None:
    assert output_files(str(tmp_path)) == (
        tmp_path / "gpu-report.html",
        tmp_path / "gpu-report.json",
    )
    for name in ("a100", "a100.html", "a100.json"):
        assert output_files(str(tmp_path / name)) == (
            tmp_path / "a100.html",
            tmp_path / "a100.json",
        )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--gpu-report", "--parts", "decod"], "--parts decod"),
        (["--gpu-report", "{}/no/such/file"], "--gpu-report"),
        (["--parts", "decode"], "--parts decode"),
        (["--gpu-report", "--quick"], "--gpu-report"),  # torch finds no GPU
        (["--gpu-report", "--device", "cuda:1"], "--device cuda:1"),
        (["--gpu-report", "--json", "a.json"], "--json a.json"),
    ],
)
def test_mistakes_end_with_one_line(
    flags: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(doctor.main, [flag.format(tmp_path) for flag in flags]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {expected}")
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_processes_have_not_touched_cuda() -> None:
    """They are forked: a server that had could not give its children a GPU."""
    script = (
        "import torch, fastaug.diagnostics.gpu_report.parts\n"
        "assert not torch.cuda.is_initialized()\n"
        "import os\npid = os.fork()\n"
        "if not pid: os._exit(torch.cuda._is_in_bad_fork())\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
