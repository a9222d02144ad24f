"""benchmarks/throughput.py: its arithmetic against hand-made turns, and tiny runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import throughput
from parts import loaders, results, stages, timing
from parts import throughput_rows as table
from parts.throughput_rows import Key
from parts.timing import Turn

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.diagnostics import photos

# --- rows ---


def samples() -> dict[Key, list[Turn]]:
    """8 views in a batch; a decode takes 1 s, a view 0.25 s, on two cores that share the work."""
    found: dict[Key, list[Turn]] = {}
    drift = (1.0, 3.0, 2.0)

    def add(key: Key, seconds: float, cpu: float = 0.0, wait: float = 0.0) -> None:
        found[key] = [Turn(d * seconds, d * cpu, d * wait) for d in drift]

    for k in (1, 2, 8):
        images = 8 // k
        loader = images * 1.0 + 8 * 0.25
        add(Key(table.STAGES, "decode", "", k), images * 1.0)
        add(Key(table.LOADERS, "fastaug fused", "crop-flip", k), loader, 2 * loader)
        add(Key(table.STAGES, "loader", "crop-flip", k), loader, 2 * loader)
        add(Key(table.STAGES, "objective", "", k), 1.0)
        step = 40.0 + loader
        add(Key(table.STAGES, "step", "crop-flip", k), step, wait=2.0)
    add(Key(table.STAGES, "forward"), 10.0)
    add(Key(table.STAGES, "forward+backward"), 30.0)
    add(Key(table.STAGES, "optimizer"), 4.0)
    add(Key(table.STAGES, "bare step"), 35.0)
    return found


def value(rows: list[table.Row], quantity: str, **what: object) -> table.Row:
    (row,) = [
        row
        for row in rows
        if row["quantity"] == quantity and all(row[name] == v for name, v in what.items())
    ]
    return row


def test_rows_of_a_loader() -> None:
    rows = table.make_rows(samples(), {}, batch_size=8, cores=2)
    own = {"contender": "fastaug fused", "K": 2}
    # 4 decodes and 8 views: 6 s; drift 1, 3, 2
    time = value(rows, "time", **own)
    assert (time["median"], time["n"], time["unit"], time["status"]) == (12_000, 3, "ms", "ok")
    assert (time["p20"], time["p80"]) == pytest.approx((8_400, 15_600))
    assert value(rows, "views/s", **own)["median"] == pytest.approx(8 / 12)
    assert value(rows, "images/s", **own)["median"] == pytest.approx(4 / 12, rel=1e-5)
    marginal = value(rows, table.MARGINAL, contender="fastaug fused")
    assert marginal["median"] == pytest.approx(0.25)
    assert marginal["p80"] == pytest.approx(0.25), "drift cancels within a round"


def test_how_much_faster_fused_is() -> None:
    """Ratios are of the same round: the machine's drift is in both."""
    key = Key(table.LOADERS, "ffcv", "crop-flip", 8)
    taken = {
        key: [Turn(seconds, 0, 0) for seconds in (3.0, 9.0, 40.0, 7.0)],
        key._replace(contender="fastaug fused"): [Turn(s, 0, 0) for s in (1.0, 3.0, 10.0)],
        key._replace(K=4): [Turn(1.0, 0, 0)],
        Key(table.STAGES, "decode", "", 8): [Turn(1.0, 0, 0)],
    }
    rows = table.make_rows(taken, {}, batch_size=8, cores=2)
    (row,) = [row for row in rows if row["quantity"] == table.FASTER]
    assert (row["contender"], row["K"], row["n"], row["unit"]) == ("ffcv", 8, 3, "ratio")
    assert row["median"] == pytest.approx(3.0)


def test_rows_of_a_step() -> None:
    rows = table.make_rows(samples(), {}, batch_size=8, cores=2)
    step = 40 + 4 + 2  # K = 2
    shares = {
        name: value(rows, table.SHARE, contender=name, K=2)["median"]
        for name in table.PARTS_OF_STEP
    }
    expected = {"forward": 10, "backward": 20, "objective": 1, "optimizer": 4, "wait for data": 2}
    expected["other"] = step - sum(expected.values())
    assert shares == pytest.approx({name: v / step for name, v in expected.items()}, rel=1e-5)
    excess = value(rows, table.EXCESS, K=2)["median"]
    assert excess == pytest.approx(step / (35 + 2 * 6 / 2), rel=1e-5)


def test_an_interrupted_round_is_used_as_far_as_it_goes() -> None:
    taken = samples()
    del taken[Key(table.STAGES, "forward")][2:]
    taken[Key(table.STAGES, "decode", "", 8)].clear()
    rows = table.make_rows(taken, {}, batch_size=8, cores=2)
    assert value(rows, table.SHARE, contender="forward", K=2)["n"] == 2
    assert value(rows, "time", contender="step", K=2)["n"] == 3
    assert not [row for row in rows if row["quantity"] == table.MARGINAL]
    assert not [row for row in rows if row["contender"] == "decode" and row["K"] == 8]


# --- comparing runs ---


def write_run(path: Path, scale: float, date: str, spread: float = 0.01) -> None:
    file = results.ResultFile(path, table.COLUMNS)
    about = dict.fromkeys(table.COLUMNS, "") | {"date": date, "threads": "2", "cpu": "x"}
    rows = []
    for k, seconds in ((1, 1.0), (8, 2.0)):
        key = Key(table.LOADERS, "fastaug fused", "crop-flip", k)
        times = [scale * seconds * (1 + spread * s) for s in (-1, -1, 0, 1, 1)]
        turns_ = {key: [Turn(t, t, 0) for t in times]}
        rows += table.make_rows(turns_, {}, batch_size=8, cores=2)
    file.append(about | row for row in rows)


@pytest.mark.parametrize(
    ("scale", "spread", "code", "word"),
    [(1.0, 0.01, 0, ""), (1.3, 0.01, 1, "SLOWER"), (0.7, 0.01, 0, "faster"), (1.3, 0.5, 0, "")],
    ids=["equal", "slower", "faster", "noise"],
)
def test_compare(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    scale: float,
    spread: float,
    code: int,
    word: str,
) -> None:
    before, after = tmp_path / "a.csv", tmp_path / "b.csv"
    write_run(before, 1.0, "2026-01-01", spread)
    write_run(after, scale, "2026-01-02", spread)
    assert cli.run(throughput.main, ["--compare", str(before), str(after)]) == code
    out = capsys.readouterr().out
    assert out.count("SLOWER") == 2 * (word == "SLOWER")
    assert out.count("  faster") == 2 * (word == "faster")
    counts = {name: 2 * (word == name) for name in ("SLOWER", "faster")}
    assert f"of 2: {counts['SLOWER']} slower, {counts['faster']} faster beyond" in out
    assert f"{1 / scale:.3f}" in out


def test_compare_the_last_two_runs_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "a.csv"
    write_run(file, 5.0, "2026-01-01")
    assert cli.run(throughput.main, ["--compare", str(file)]) == 2  # one run only
    assert str(file) in capsys.readouterr().err
    write_run(file, 1.0, "2026-01-02")
    write_run(file, 2.0, "2026-01-03")
    assert cli.run(throughput.main, ["--compare", str(file)]) == 1
    assert "0.500" in capsys.readouterr().out


# --- mistakes ---


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--views", "3"], "--views"),
        (["--views", "0"], "--views"),
        (["--loaders", "torchvison, one decode"], "torchvision, one decode"),
        (["--loaders", "fastaug dali"], "fastaug dali operators"),
        (["--data", "/no/such/folder"], "/no/such/folder"),
        (["--compare", "/no/such.csv"], "/no/such.csv"),
        (["--compare", "a", "b", "c"], "--compare"),
        (["--classes", "2"], "--classes"),
        (["--turn-seconds", "0"], "--turn-seconds"),
        (["--device", "cuda:9"], "--device"),
        (["--model", "nf_resnet5"], "nf_resnet50"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], named: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    args = ["--quick", "--data", str(folder), "--out", str(tmp_path / "out"), *flags]
    assert cli.run(throughput.main, args) == 2
    error = capsys.readouterr().err.strip()
    assert named in error
    assert "\n" not in error.partition("error: ")[2]


# --- tiny runs ---

TINY = ["--quick", "--views", "1", "2", "--size", "32", "--batch-size", "4", "--repeats", "2"]
TINY += ["--model", "wrn-10-1", "--turn-seconds", "0.001", "--workers", "1", "--device", "cpu"]


def run(folder: Path, out: Path, *flags: str) -> tuple[int, list[dict[str, str]]]:
    args = [*TINY, "--data", str(folder), "--out", str(out), *flags]
    code = cli.run(throughput.main, args)
    return code, results.read(out / "throughput.csv", table.COLUMNS)


def test_a_whole_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    both = ("--policies", "crop-flip", "randaugment")
    names = ("fastaug fused", "torchvision, one decode", "ffcv")
    code, rows = run(folder, tmp_path, *both, "--loaders", *names)
    assert code == 0
    out = capsys.readouterr().out
    failed = {(row["contender"], row["status"]) for row in rows if row["status"] != "ok"}
    assert {name for name, _ in failed} <= {"ffcv"}, failed
    stages = {(row["contender"], row["K"]) for row in rows if row["part"] == "stages"}
    for stage in ("decode", "loader", "objective", "step, synthetic views", "step"):
        assert {(stage, "1"), (stage, "2")} <= stages
    for stage in ("forward", "forward+backward", "optimizer", "bare step"):
        assert (stage, "") in stages
    loaders = {
        (row["contender"], row["policy"], row["K"]) for row in rows if row["part"] == "loaders"
    }
    for name in names:
        for policy in ("crop-flip", "randaugment"):
            assert {(name, policy, "1"), (name, policy, "2")} <= loaders
    for row in rows:
        numbers = [row[column] for column in ("median", "p20", "p80", "n")]
        assert all(map(_is_number, numbers)) if row["status"] == "ok" else not any(numbers)
    images, views = (
        value(rows, quantity, contender="step", K="2") for quantity in ("images/s", "views/s")
    )
    assert float(views["median"]) == pytest.approx(2 * float(images["median"]), rel=1e-4)
    for name in (*names, "step, images/s", "wait for data", "fused loader"):
        assert name in out
    settings = {
        (row["loader"], row["crop"], row["interpolation"], row["antialias"]) for row in rows
    }
    assert settings == {("fused", "resized", "bilinear", "True")}
    faster = {row["contender"] for row in rows if row["quantity"] == table.FASTER}
    assert faster == {*names[1:]} - {name for name, _ in failed}
    for name in ("throughput.png", "view-cost.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_the_stages_take_the_loader_that_was_asked_for(
    loader: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a training with it would build, and its time by itself."""
    built: list[tuple[str, str]] = []
    build = stages.build_loader

    def noted(config: TrainConfig, images: ImageSet) -> object:
        built.append((config.data.loader, config.view.views_engine))
        return build(config, images)

    for module in (stages, loaders):
        monkeypatch.setattr(module, "build_loader", noted)
    _, rows = run(folder, tmp_path, "--parts", "stages", "--loader", loader, "--views", "2")
    trained = {"dali": ("dali", "dali"), "torch": ("torch", "auto")}
    # By itself, in a training, and to see how far it is ahead there.
    assert built == [trained[loader]] * 3
    assert {row["part"] for row in rows} == {"stages"}
    assert {row["loader"] for row in rows} == {loader}


def test_small_images_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(throughput, "cifar_like", lambda: photos.cifar_like(tmp_path))
    monkeypatch.setattr(photos, "PER_CLASS", {"train": 1, "val": 1})
    monkeypatch.setattr(photos, "SMALL_COUNTS", {"train": 40, "test": 4})
    few = ("--parts", "loaders", "--crop", "pad", "--views", "2")
    few += ("--repeats", "1", "--loaders", *throughput.LOADERS)
    code, rows = run(Path("cifar-like"), tmp_path / "out", *few)
    assert code == 0
    assert {row["data"] for row in rows} == {"cifar-like"}
    assert {row["contender"] for row in rows if row["status"] != "ok"} == {
        "timm, K decodes",
        "ffcv",
    }
    ran = {"fastaug fused", "fastaug dali operators", "fastaug torch"}
    ran |= {"torchvision, one decode", "torchvision, K decodes"}
    assert {row["contender"] for row in rows if row["status"] == "ok"} == ran
    assert "reflected edges" in capsys.readouterr().out


def _is_number(text: str) -> bool:
    return math.isfinite(float(text))


def test_an_interrupted_run_keeps_what_it_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interleave = timing.interleave

    def interrupted(*args: object, on_turn: object, **kwargs: object) -> object:
        taken = []

        def stops(key: Key) -> None:
            taken.append(key)
            if len(taken) == 3:
                raise KeyboardInterrupt

        return interleave(*args, on_turn=stops, **kwargs)

    monkeypatch.setattr(timing, "interleave", interrupted)
    loaders = ("--parts", "loaders", "--policies", "crop-flip", "--loaders", "fastaug torch")
    code, rows = run(folder, tmp_path, *loaders, "--views", "1", "2", "4")
    assert code == 130
    assert sum(row["quantity"] == "time" for row in rows) == 2
    assert {row["n"] for row in rows if row["quantity"] == "time"} == {"1"}

    # It is drawn again from the file.
    (tmp_path / "throughput.png").unlink()
    assert cli.run(throughput.main, ["--plot-only", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "throughput.png").exists()
    (tmp_path / "throughput.csv").write_text(",".join(table.COLUMNS) + "\n")
    assert cli.run(throughput.main, ["--plot-only", "--out", str(tmp_path)]) == 2


def test_what_does_not_fit_into_memory_is_a_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "free_memory", lambda device: 10_000.0)
    code, rows = run(folder, tmp_path, "--loaders", "fastaug torch", "--policies", "crop-flip")
    assert code == 0
    status = {row["contender"]: row["status"] for row in rows if row["status"] != "ok"}
    assert status["fastaug torch"].startswith("out of memory: ")
    assert status["network"].startswith("out of memory: ")
    assert "decode" not in status
