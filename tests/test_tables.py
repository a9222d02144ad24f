"""The tables of README.md and docs/performance.md are what the committed results say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fastaug import cli
from fastaug.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import predict
import records
import tables
import throughput_rows

RESULTS = tables.ROOT / "benchmarks/results"


@pytest.mark.parametrize("name", tables.FILES)
def test_the_docs_say_what_was_measured(name: str) -> None:
    text = (tables.ROOT / name).read_text()
    assert "<!-- table " in text
    assert tables.renew(text, latest=False) == text, "run python benchmarks/tables.py"


def test_a_number_in_the_table_is_one_of_the_file() -> None:
    """Read from the CSV by hand, not by the code that wrote the table."""
    text = (tables.ROOT / "docs/performance.md").read_text()
    date = re.search(r"<!-- table loaders-crop-flip (\S+) -->", text)[1]
    row = next(line for line in text.splitlines() if line.startswith("| fastaug dali |"))
    lines = (RESULTS / "throughput.csv").read_text().splitlines()
    # The name of a contender with a comma in it would be quoted: this one has none.
    (found,) = [
        line.split(",")
        for line in lines
        if line.startswith(date) and ",loaders,fastaug dali,crop-flip,8,views/s," in line
    ]
    median = float(found[lines[0].split(",").index("median")])
    assert row.split("|")[5].strip().startswith(f"{median:,.0f} (")


def test_a_changed_number_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tables.FILES:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = (tables.ROOT / name).read_text()
        file.write_text(re.sub(r"(\| fastaug dali \|) [\d,]+", r"\1 1", text))
    monkeypatch.setattr(tables, "FILES", tuple(str(tmp_path / name) for name in tables.FILES))
    assert cli.run(tables.main, ["--check"]) == 1
    assert cli.run(tables.main, []) == 0
    assert cli.run(tables.main, ["--check"]) == 0


def test_an_unknown_table() -> None:
    with pytest.raises(ConfigError, match="no table is called 'nonsense'; there are machine"):
        tables.renew("<!-- table nonsense -->\n<!-- end -->", latest=True)


def test_every_committed_row_is_whole() -> None:
    for name, columns in (
        ("throughput", throughput_rows.COLUMNS),
        ("predict", predict.COLUMNS),
    ):
        rows = records.read(RESULTS / f"{name}.csv", columns)
        assert rows
        assert all(None not in row and None not in row.values() for row in rows)
        if name == "predict":
            assert {row["status"] for row in rows} == {"prediction"}
