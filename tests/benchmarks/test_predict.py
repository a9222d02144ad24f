"""The prediction's model against sums by hand. No test looks at how long a thing takes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import predict
import pytest
import torch
from parts import cpu_check, paper_cost, results
from parts.cpu_check import Cores, Probes, Stage
from torch import nn

from fastaug import cli
from fastaug.diagnostics import step_model
from fastaug.diagnostics.gpu_report import throughput as throughput_part
from fastaug.diagnostics.gpu_report.results import GpuReport, PartResult, TableResult
from fastaug.diagnostics.step_model import Op, Rates, Work

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
TINY = ["--model", "wrn-10-1", "--size", "32", "--classes", "10", "--quick"]
WORK = Work(
    *(64, 8, 10, 1000),  # views, size, classes, parameters
    forward=(Op(1e9, 1e6), Op(0, 4e6)),
    backward=(Op(2e9, 2e6), Op(0, 8e6)),
)
RATES = Rates(flops=1e12, memory=1e10, decode=1e6, view_passes=0, objective_passes=0)
"""Of WORK: 3 ms of arithmetic, 1.2 ms of memory, and the optimizer's 2 us."""
OPTIMIZER = 5 * 1000 * 4 / 1e10


def test_a_linear_layer_is_counted_as_by_hand() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False))
    work = step_model.count_work(lambda: model, views=7, size=2)
    flops, moved = 2 * 7 * 12 * 5, 4 * (7 * 12 + 12 * 5 + 7 * 5)
    copy = Op(0, 2 * 4 * 7 * 12)  # Flatten's, of images that are channels last
    assert work.forward == (copy, Op(flops, moved))
    # The images need no gradient: the backward pass has the weight's product alone.
    assert sum(op.flops for op in work.backward) == flops
    assert (work.parameters, work.classes, work.views, work.size) == (60, 5, 7, 2)


def test_a_convolution_in_half_precision_moves_half_the_bytes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Flatten())
    flops = 2 * 4 * 16 * 16 * 8 * 3 * 9
    moved = 4 * 3 * 256 + 8 * 3 * 9 + 4 * 8 * 256
    for precision, width in (("fp32", 4), ("bf16", 2)):
        work = step_model.count_work(lambda: model, views=4, size=16, precision=precision)
        assert [op for op in work.forward if op.flops] == [Op(flops, width * moved)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, 0.0),
        (2, 2 * 1 / 2 * 800 / 100 + 2 * 1 * 0.5),
        (8, 2 * 7 / 8 * 800 / 100 + 2 * 3 * 0.5),
        (16, 2 * 7 / 8 * 800 / 100 + 2 * 1 / 2 * (800 / 8) / 10 + 2 * 4 * 0.5),
    ],
)
def test_all_reduce(count: int, expected: float) -> None:
    rates = replace(RATES, link=100, network=10, hop=0.5, node=8)
    assert step_model.all_reduce(800, count, rates) == pytest.approx(expected)


def test_the_step_is_the_sum_of_its_operations() -> None:
    step = step_model.predict(WORK, RATES, k=4)
    assert step.seconds == pytest.approx(3e-3 + 1.2e-3 + OPTIMIZER)
    assert step.images == pytest.approx(16 / step.seconds)
    assert step.views == pytest.approx(64 / step.seconds)
    assert step.limit == step_model.COMPUTE
    on_sms = replace(RATES, decode=16 / 1e-3, decode_on_device=True)
    assert step_model.predict(WORK, on_sms, k=4).seconds == pytest.approx(step.seconds + 1e-3)
    rates = replace(RATES, view_passes=6, objective_passes=4)
    assert step_model.view_seconds(WORK, rates) == pytest.approx(6 * 64 * 3 * 64 * 4 / 1e10)
    assert step_model.objective_seconds(WORK, rates) == pytest.approx(4 * 64 * 10 * 4 / 1e10)


@pytest.mark.parametrize(
    ("starved", "limit"),
    [  # each takes a second
        ({"decode": 64}, step_model.DECODE),
        ({"storage": 8 * 64 * 110_000}, step_model.STORAGE),
        ({"pcie": 64 * 110_000}, step_model.PCIE),
        ({"launch": 1 / 14}, step_model.LAUNCH),
        ({"memory": 1.5e7 + 2e4}, step_model.MEMORY),
        ({"flops": 3e9}, step_model.COMPUTE),
        ({"network": 4000 * 7 / 4}, step_model.ALL_REDUCE),
    ],
)
def test_what_is_starved_limits(starved: dict[str, float], limit: str) -> None:
    step = step_model.predict(WORK, replace(RATES, **starved), k=1, devices=8)
    assert step.limit == limit
    assert step.seconds == pytest.approx(1, rel=0.005)


def test_the_backward_pass_hides_the_all_reduce() -> None:
    backward = 2e-3 + 0.8e-3
    plain = step_model.predict(WORK, RATES, k=1).seconds
    for share, times in ((0.5, 0.3), (0.5, 3.0), (1.0, 0.9), (1.0, 3.0)):
        # node = 1: 8 devices exchange 7/4 of the gradients
        rates = replace(RATES, network=7 / 4 * 4000 / (times * backward), overlap=share)
        seconds = step_model.predict(WORK, rates, k=1, devices=8).seconds
        assert seconds == pytest.approx(plain + max(0, times - share) * backward)


def test_crossover() -> None:
    rates = replace(RATES, decode=64 / 13e-3)  # 13, 6.5, 3.25 ms for K of 1, 2, 4; training 4.2
    cases = ((rates, (8, 4, 2, 1)), (rates, (1, 2)), (RATES, (1,)))
    found = [step_model.crossover_k(WORK, given, views) for given, views in cases]
    assert found == [4, None, 1]


@pytest.mark.parametrize("gpu", step_model.GPUS)
@pytest.mark.parametrize("host", [False, True])
def test_more_views_never_give_more_images_nor_fewer_views(gpu: str, host: bool) -> None:
    found = {}
    for case in ("low", "mid", "high"):
        rates = step_model.gpu_rates(gpu, case, storage=1e9, decode_on_host=host)
        for devices in (1, 8, 4096):
            steps = [step_model.predict(WORK, rates, k=k, devices=devices) for k in (1, 2, 4, 64)]
            images, views = [step.images for step in steps], [step.views for step in steps]
            assert images == sorted(images, reverse=True)
            assert views == pytest.approx(sorted(views))
            found[case, devices] = images[0]
    for devices in (1, 8, 4096):
        assert found["low", devices] <= found["mid", devices] <= found["high", devices]
        assert found["mid", devices] <= devices * found["mid", 1] * (1 + 1e-9)


def test_every_number_has_a_source_or_is_assumed() -> None:
    names = dict(predict.listed_inputs(predict.Options()))
    assert len(names) == 4 * 10 + 11 + 2
    for name, value in names.items():
        assert value.source.startswith("assumed: ") or "https://" in value.source, name
        assert value.value > 0, name
        if value.low is not None and value.high is not None:
            assert sorted((value.low, value.value, value.high))[1] == value.value, name


LAUNCH = 1e-4
CPU = Probes(1e12, bandwidth=((1e6, 1e10), (1e8, 1e10)), launch=LAUNCH, parallel=0.0)


def measured(share: float) -> dict[Stage, float]:
    """What a machine measures that does `share` of the probes, and loads as the model says."""
    forward, both = 1.4e-3 + 2 * LAUNCH, 4.2e-3 + 4 * LAUNCH
    training = both + OPTIMIZER + 4 * 64 * 10 * 4 / 1e10 + 10 * LAUNCH
    found = {("forward", "", 0): forward / share, ("forward+backward", "", 0): both / share}
    for k in (1, 2):
        decode, loader = 64 / k * 1e-4, 64 / k * 1e-4 + 64 * 2e-5
        found |= {("decode", "", k): decode, ("loader", "crop-flip", k): loader}
        found |= {("loader", "randaugment", k): 9.0}
        found |= {("step", "crop-flip", k): training / share + loader / 2}
    return {Stage(*key): seconds for key, seconds in found.items()}


def test_the_check_finds_no_error_where_there_is_none() -> None:
    found = cpu_check.compare(WORK, CPU, measured(0.5), Cores(threads=2, workers=1, cores=2))
    assert found.share == pytest.approx(0.5)
    assert [Cores(1, 1, 2).together(*pair) for pair in ((3, 2), (2, 3))] == [3, 3]
    lines = {line.stage: line for line in found.lines}
    assert found.inputs == (Stage("decode", "", 1), Stage("loader", "crop-flip", 2))
    assert not set(found.inputs) & set(lines)
    assert "randaugment" not in {stage.policy for stage in lines}
    for stage in (("step", "crop-flip", 1), ("step", "crop-flip", 2), ("loader", "crop-flip", 1)):
        line = lines[Stage(*stage)]
        assert line.calibrated == pytest.approx(line.measured)
        assert line.predicted < line.measured or line.stage.contender == "loader"


def write_throughput(path: Path, cpu: str = "") -> Path:
    about = dict.fromkeys(cpu_check.READ, "")
    about |= {"date": "today", "cpu": cpu or results.cpu_name(), "threads": "1", "device": "cpu"}
    about |= {"model": "wrn-10-1", "classes": "10", "size": "32", "batch_size": "8"}
    about |= {"precision": "fp32", "workers": "1", "part": "stages", "quantity": "time"}
    about["status"] = "ok"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, cpu_check.READ)
        writer.writeheader()
        for date, stages in (("yesterday", measured(0.1)), ("today", measured(0.5))):
            for stage, seconds in stages.items():
                k = {"contender": stage.contender, "policy": stage.policy, "K": stage.k or ""}
                writer.writerow(about | k | {"date": date, "median": str(1e3 * seconds)})
    return path


def test_everything_says_prediction(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    titles: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda self, t, **_: titles.append(t))
    assert cli.run(predict.main, [*TINY, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "PREDICTION" in titles[0]
    assert (tmp_path / "predict.png").read_bytes().startswith(b"\x89PNG")
    heads = [line for line in said.splitlines() if line[:1].isalpha() and "low-high" not in line]
    assert len(heads) == 1 + 2 + 2 + 2  # inputs; a table and a conclusion for each GPU; files
    assert all(line.lower().startswith("prediction") for line in heads[:-1])
    rows = results.read(tmp_path / "predict.csv", predict.COLUMNS)
    assert {(row["status"], row["gpu"]) for row in rows} == {("prediction", "")}
    assert len(rows) == 2 * 3 * 2 * (2 + 7)  # images/s, views/s and seven resources
    listed = predict.listed_inputs(predict.parse(TINY))
    assert all(name in said and value.source in said for name, value in listed)


def test_assumptions_can_be_replaced() -> None:
    options = predict.parse(["--assume", "compute=0.25", "launch=1e-4"])
    plain = step_model.gpu_rates("A100", "high")
    for case in ("low", "mid", "high"):
        rates = predict._rates("A100", options, case)
        assert (rates.flops, rates.launch) == (312e12 * 0.25, 1e-4)
    assert rates.memory == plain.memory
    assert dict(predict.listed_inputs(options))["all GPUs, compute"].source.startswith("assumed")


def test_check_run(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    path = write_throughput(tmp_path / "throughput.csv")
    given = (["--check"], ["--check", "--quick"], ["--check", "x.csv"])
    assert [predict.parse(f).check for f in given] == [*[predict.THROUGHPUT] * 2, "x.csv"]
    assert cpu_check.read_stages(path)[1] == pytest.approx(measured(0.5))
    monkeypatch.setattr(cpu_check, "run_probes", lambda precision: CPU)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert cli.run(predict.main, ["--check", str(path), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("PREDICTION") == 2
    assert "today: decode at K=1 and loader at K=2" in said
    for row in results.read(tmp_path / "predict.csv", predict.COLUMNS):
        assert row["status"] == "prediction"
        error = float(row["value"]) / float(row["measured"]) - 1
        assert float(row["error"]) == pytest.approx(error, abs=1e-3)


# --- the paper's experiments ---


def cells(capsys: Capture) -> list[str]:
    line = capsys.readouterr().out.strip().splitlines()[-1]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_hours_are_steps_times_seconds(monkeypatch: Patch, capsys: Capture) -> None:
    """The sweep of the weight: 6 weights, 6 rates, 5 seeds, 128 epochs of 50,000 / 4 steps."""
    seconds = {"mid": 0.01, "high": 0.005, "low": 0.02}
    monkeypatch.setattr(paper_cost, "step_gpu_seconds", lambda *key: seconds[key[-1]])
    args = ["--paper", "--experiments", "cifar100-lambda", "--gpus", "A100"]
    assert cli.run(predict.main, args) == 0
    steps = 6 * 6 * 5 * 128 * 12_500
    assert cells(capsys) == [
        "cifar100-lambda",
        "180",
        f"{steps * 64 / 1e9:,.0f} billion",
        f"{steps * 0.01 / 3600:,.0f} ({steps * 0.005 / 3600:,.0f} to {steps * 0.02 / 3600:,.0f})",
    ]
    assert cli.run(predict.main, [*args, "--tune-one-seed"]) == 0
    # One seed of all 36 points, and four more of one point for each weight.
    assert cells(capsys)[1] == str(36 + 6 * 4)


def test_a_step_costs_more_than_its_arithmetic_on_all_gpus() -> None:
    """64 views on eight GPUs are eight on each, and all eight are paid for."""
    found = paper_cost.step_gpu_seconds(
        "nf_resnet26", 224, 64, 8, "bf16", "crop-flip", "A100", "mid"
    )
    work = step_model.network_work("nf_resnet26", 1000, 224, 8, "bf16")
    flops = sum(op.flops for op in (*work.forward, *work.backward))
    assert found > 8 * flops / (312e12 * 0.5)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gpus", "A10O"], "a100"),
        (["--views", "3"], "255"),
        (["--count", "0"], "--count"),
        (["--storage", "0"], "--storage"),
        (["--assume", "overlap=x"], "--assume overlap=x"),
        (["--assume", "compote=1"], "compute"),
        (["--model", "wrm-16-4"], "wrn-16-4"),
        (["--paper", "--experiments", "cifar100-lamda"], "cifar100-lambda"),
        (["--check", "nowhere.csv"], "--check nowhere.csv"),
        (["--check", "other.csv"], "--check other.csv"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], named: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_throughput(tmp_path / "other.csv", cpu="another")
    assert cli.run(predict.main, [*flags, "--out", str(tmp_path)]) == 2
    assert [named in line for line in capsys.readouterr().err.splitlines()] == [True]


def test_a_gpu_report_is_compared_with_the_prediction(tmp_path: Path, capsys: Capture) -> None:
    row = [4, 64, 300.0, 1200.0, 53.0, 0.0, 900.0, 1.0, 20.0, 0.1, 30.0, 2.0, 1000.0]
    columns = throughput_part._COLUMNS
    settings = ["wrn-10-1", 32, 10, "bf16", "crop-flip", "dali"]
    tables = (
        TableResult("decode", "", (("loader", ""), ("images/s", "")), [["dali", 3500.0]]),
        TableResult("settings", "", throughput_part._SETTINGS, [settings]),
        TableResult("throughput", "", columns, [row]),
    )
    part = PartResult("throughput", "", "passed", 1.0, tables=tables)
    path = tmp_path / "report.json"
    for name, code in (("NVIDIA A100-SXM4-80GB", 0), ("Other GPU", 2)):
        report = GpuReport("now", "0", "0", (name,), False, False, True, (part,))
        path.write_text(json.dumps(report.to_json()))
        assert cli.run(predict.main, ["--check", str(path)]) == code
    shown = capsys.readouterr()
    (line,) = [line for line in shown.out.splitlines() if line.startswith("decoding, images/s")]
    assert line.split()[2:] == ["3,500", "7,000", "5,000", "8,000", "0.50", "no"]
    assert shown.err.startswith(f"error: --check {path}: ")
    assert len(shown.err.splitlines()) == 1
