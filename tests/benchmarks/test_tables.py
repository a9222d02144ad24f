"""The tables and plots of README.md and docs/ are what the committed results say."""

from __future__ import annotations

import re
from pathlib import Path

import predict
import pytest
import tables
from parts import results, throughput_rows
from parts.timing import Turn

from fastaug import cli
from fastaug.errors import ConfigError

RESULTS = tables.ROOT / "benchmarks/results"


@pytest.mark.parametrize("name", tables.FILES)
def test_the_docs_say_what_was_measured(name: str) -> None:
    text = (tables.ROOT / name).read_text()
    assert "<!-- table " in text
    assert tables.update(text, latest=False) == text, "run python benchmarks/tables.py"


def test_a_number_in_the_table_is_one_of_the_file() -> None:
    """Read from the CSV by hand, not by the code that wrote the table."""
    text = (tables.ROOT / "docs/performance.md").read_text()
    date, table = re.search(
        r"<!-- table loaders-crop-flip (\S+) -->(.*?)<!-- end", text, re.S
    ).groups()
    row = next(line for line in table.splitlines() if line.startswith("| fastaug fused |"))
    lines = (RESULTS / "throughput.csv").read_text().splitlines()
    # The name of a contender with a comma in it would be quoted: this one has none.
    (found,) = [
        line.split(",")
        for line in lines
        if line.startswith(date) and ",loaders,fastaug fused,crop-flip,8,views/s," in line
    ]
    median = float(found[lines[0].split(",").index("median")])
    assert row.split("|")[5].strip().startswith(f"{median:,.0f} (")


def test_a_changed_number_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tables.FILES:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = (tables.ROOT / name).read_text()
        file.write_text(re.sub(r"(\| fastaug fused \|) [\d,]+", r"\1 1", text))
    monkeypatch.setattr(tables, "FILES", tuple(str(tmp_path / name) for name in tables.FILES))
    assert cli.run(tables.main, ["--check"]) == 1
    assert cli.run(tables.main, []) == 0
    assert cli.run(tables.main, ["--check"]) == 0


def test_a_stale_plot_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RECORD", tmp_path / "no record")
    monkeypatch.setattr(tables, "FILES", ())
    for folder in ("benchmarks/results", "docs/images"):
        (tmp_path / folder).mkdir(parents=True)
        for name in tables.PLOTS:
            (tmp_path / folder / name).write_bytes(b"a plot")
    assert cli.run(tables.main, ["--check"]) == 0
    (tmp_path / "benchmarks/results" / tables.PLOTS[0]).write_bytes(b"a newer plot")
    assert cli.run(tables.main, ["--check"]) == 1
    assert cli.run(tables.main, []) == 0
    assert (tmp_path / "docs/images" / tables.PLOTS[0]).read_bytes() == b"a newer plot"
    assert cli.run(tables.main, ["--check"]) == 0


def test_the_committed_plots_are_those_of_the_results() -> None:
    for name in tables.PLOTS:
        shown = (tables.ROOT / "docs/images" / name).read_bytes()
        assert shown == (RESULTS / name).read_bytes(), "run python benchmarks/tables.py"


def test_the_kernels_table_shows_rows_of_the_file() -> None:
    """Read from the CSV by hand, not by the code that wrote the table."""
    text = (tables.ROOT / "docs/guide/kernels.md").read_text()
    date, table = re.search(r"<!-- table kernels (\S+) -->(.*?)<!-- end", text, re.S).groups()
    row = next(line for line in table.splitlines() if line.startswith("| B=128 K=16 C=1000 |"))
    lines = (RESULTS / "kernels.csv").read_text().splitlines()
    (found,) = [
        line.split(",")
        for line in lines
        if line.startswith(date) and ",cpu,native,forward+backward,128,16,1000," in line
    ]
    median = float(found[lines[0].split(",").index("median")])
    assert row.split("|")[3].strip() == f"{median:.2f} ms"


def write_runs(path: Path, *runs: dict[str, str]) -> None:
    """Runs of one loader beside fused, which is 2.5 times as fast."""
    file = results.ResultFile(path, throughput_rows.COLUMNS)
    for number, changes in enumerate(runs):
        about = dict.fromkeys(throughput_rows.COLUMNS, "") | {"data": "photos", "crop": "resized"}
        about |= {"interpolation": "bilinear", "antialias": "True", "date": f"day-{number}"}
        about |= {"randaugment_layers": "2", "randaugment_magnitude": "5.0"}
        taken = {
            throughput_rows.Key("loaders", name, policy, 16): [Turn(seconds, 0, 0)]
            for policy in ("crop-flip", "randaugment")
            for name, seconds in (("fastaug fused", 0.02), ("ffcv", 0.05))
        }
        views = int(changes.get("batch_size", "32"))
        found = throughput_rows.make_rows(taken, {}, batch_size=views, cores=1)
        file.append(about | changes | row for row in found)


def test_a_table_is_of_the_runs_that_it_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    folder = tmp_path / "benchmarks/results"
    others = ({"interpolation": "bicubic"}, {"antialias": "False"}, {"data": "/mine"})
    write_runs(folder / "throughput.csv", {}, {}, *others)
    small = {"data": "cifar-like", "crop": "pad"}
    sizes = ({"batch_size": size} for size in ("64", "1024", "32"))
    write_runs(folder / "cifar/throughput.csv", *(small | size for size in sizes))

    def made(name: str) -> list[str]:
        text = f"<!-- table {name} day-9 -->\n<!-- end -->"
        lines = tables.update(text, latest=True).splitlines()
        assert tables.update("\n".join(lines), latest=False).splitlines() == lines
        return lines

    assert made("faster-crop-flip") == [
        "<!-- table faster-crop-flip day-1 -->",
        "| fastaug fused / other | K=16 |",
        "| --- | --- |",
        "| ffcv | 2.50 |",
        "<!-- end -->",
    ]
    assert made("loaders-randaugment")[3] == "| fastaug fused | 1,600 (100) |  |"
    assert made("in-memory-64")[0].endswith(" day-0 -->")
    assert made("in-memory-1024")[1:-1] == [
        "| views/s (fused / other), 1024 views a batch | crop and flip, K=16 "
        "| crop, flip and RandAugment (N=2, M=5), K=16 |",
        "| --- | --- | --- |",
        "| fastaug fused | 51,200 | 51,200 |",
        "| ffcv | 20,480 (2.50) | 20,480 (2.50) |",
    ]
    (folder / "cifar/throughput.csv").unlink()
    write_runs(folder / "cifar/throughput.csv", small | {"batch_size": "64"})
    with pytest.raises(ConfigError, match="in-memory-1024"):
        made("in-memory-1024")


def test_an_unknown_table() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        tables.update("<!-- table nonsense -->\n<!-- end -->", latest=True)


def test_every_committed_row_is_whole() -> None:
    measured = RESULTS.rglob("throughput.csv")
    files = dict.fromkeys(measured, throughput_rows.COLUMNS)
    for path, columns in (files | {RESULTS / "predict.csv": predict.COLUMNS}).items():
        rows = results.read(path, columns)
        assert rows
        assert all(None not in row and None not in row.values() for row in rows)
        if path.stem == "predict":
            assert {row["status"] for row in rows} == {"prediction"}
