"""The report: one page that needs nothing else, with working links and the numbers of the runs."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from run_folders import SCRIPT, SHAPES, measures, write_run, write_sweep

from fastaug import cli, report
from fastaug.experiments.report_format import Cell, duration, mean_cell, measure_text, number
from fastaug.experiments.report_media import MAX_POINTS, plot, read_metrics, thinned

HOSTILE = f'"><img src=x onerror=alert(1)>{SCRIPT}'
FAMILY = "family-wrn-10-1-on-shapes"
SETTING = f"{FAMILY}_k4-losses-kl1.0"


class Page(HTMLParser):
    """A parsed page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        """The texts of the cells of every row of every table."""
        self.row_ids: list[str | None] = []
        self.texts: list[str] = []
        self._cell: list[str] | None = None
        self.text = text
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag == "tr":
            self.rows.append([])
            self.row_ids.append(given.get("id"))
        elif tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self.rows[-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._cell is not None:
            self._cell.append(data)

    def attributes(self, name: str) -> list[str]:
        return [str(given[name]) for _, given in self.tags if name in given]

    def row(self, id: str) -> list[str]:
        return self.rows[self.row_ids.index(id)]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("sweep")
    write_sweep(top)
    return top


@pytest.fixture(scope="module")
def page(sweep: Path) -> Page:
    assert report.main([str(sweep)]) == 0
    return Page((sweep / "report.html").read_text(encoding="utf-8"))


def test_ids_are_unique_and_every_link_leads_to_one(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    links = page.attributes("href") + page.attributes("xlink:href")
    inside = [link.removeprefix("#") for link in links if link.startswith("#")]
    assert len(inside) > 50
    used = re.findall(r"url\(#([^)]+)\)", page.text)
    assert used, "figures clip their lines"
    assert {*inside, *used} <= set(page.ids)


def test_nothing_is_fetched_and_only_the_page_s_script_runs(page: Page) -> None:
    addresses = [value for name in ("src", "href", "xlink:href") for value in page.attributes(name)]
    assert all(value.startswith(("#", "data:")) for value in addresses)
    without_names = re.sub(r' xmlns(:\w+)?="[^"]*"', "", page.text)
    assert not re.search(r"https?://|@import|url\((?!#)", without_names)
    (policy,) = [
        str(given["content"])
        for tag, given in page.tags
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy"
    ]
    [script] = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "img-src data:;" in policy


def test_names_from_runs_are_text(page: Page, sweep: Path) -> None:
    assert page.text.count("<script") == 1
    assert "b" not in {tag for tag, _ in page.tags}
    shown = "".join(page.texts)
    assert SCRIPT in shown, "the recipe's name"
    assert str(sweep / 'odd"<b>&amp;') in shown
    assert f"half-{SCRIPT}".replace("/", "") in shown


def test_a_setting_has_the_means_of_its_chosen_runs(page: Page) -> None:
    row = page.row(SETTING)
    assert row[:10] == [
        *("4", "losses", "1", "0.04", "4", "2"),
        "71.50 [70.00–73.00]",  # noqa: RUF001
        "73.50 [72.00–75.00]",  # noqa: RUF001
        "0.285 [0.27–0.3]",  # noqa: RUF001
        "validation, best of 2",
    ]
    assert row[10].split() == ["0", "1", "all", "4"]
    start = page.text.index(f'id="{SETTING}"')
    cells = page.text[start : page.text.index("</tr>", start)]
    assert '<td class="number" data-value="0.715">71.50 ' in cells, "sorted as a number"


def test_select_on_test_takes_the_other_rate(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "by-test.html"
    assert report.main([str(sweep), "--select-on", "test", "--out", str(out)]) == 0
    row = Page(out.read_text(encoding="utf-8")).row(SETTING)
    assert row[3] == "0.02"
    assert row[6].startswith("81.00 ")
    assert row[9] == "test, best of 2"


def test_settings_and_runs_link_to_each_other(page: Page) -> None:
    start = page.text.index(f'id="{SETTING}"')
    links = re.findall(r'href="#(run-\w+)"', page.text[start : page.text.index("</tr>", start)])
    assert len(links) == 2
    for run in links:
        start = page.text.index(f'id="{run}"')
        section = page.text[start : page.text.index("</details>", start)]
        assert f'href="#{SETTING}"' in section
        assert f'href="#{FAMILY}_views-4-crop-flip"' in section


def test_every_run_has_a_row_and_a_section(page: Page) -> None:
    start = page.text.index('id="runs-table"')
    rows = page.text[start : page.text.index("</table>", start)].count("<tr>") - 1
    sections = sum(given.get("class") == "run" for _, given in page.tags)
    assert rows == sections == 6


def test_a_run_shows_its_curves_and_its_configuration(page: Page) -> None:
    labels = [label for label in page.attributes("aria-label") if "over the epochs" in label]
    assert "training loss over the epochs: loss ends at 1, nll ends at 0.5, kl ends at 1" in labels
    assert "top-1 in %, held-out images over the epochs: top-1 ends at 73" in labels
    assert sum("metrics.jsonl" in text for text in page.texts) == 2, "two runs have none"
    assert ["--lr", "0.02"] in page.rows
    assert ["--lr", "0.04"] in page.rows
    assert not any(row[0] == "--momentum" for row in page.rows if row)
    assert sum('"momentum": 0.9' in text for text in page.texts) == 6
    assert any("--momentum 0.9" in text for text in page.texts), "shared by all runs"


def test_views_are_shown_once_and_small(page: Page) -> None:
    (picture,) = [given for tag, given in page.tags if tag == "img"]
    assert "4 views" in str(picture["alt"])
    _, _, data = str(picture["src"]).partition("base64,")
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (1200, 150)


def test_the_page_says_what_it_is_made_from(page: Page, sweep: Path) -> None:
    shown = "".join(page.texts)
    assert "6 finished runs in 2 families" in shown
    assert str(sweep) in shown
    assert "1 run folder without a result" in shown
    assert "summary.json" in shown


def test_the_same_runs_make_the_same_page_and_the_command_says_where(
    page: Page, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "again.html"
    assert report.main([str(sweep), "--out", str(out)]) == 0
    again = out.read_text(encoding="utf-8")
    minute = re.compile(r"made [^;]*? by fastaug")
    assert minute.sub("", again) == minute.sub("", page.text)
    size = f"{out.stat().st_size / 1000:.0f} kB"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"6 runs (1 unfinished): {out} ({size})"


@pytest.mark.parametrize(
    ("prepare", "flags", "named"),
    [
        (lambda top: None, [], "no run folder"),
        (lambda top: (top / "config.json").write_text("{"), [], "no finished run among 1"),
        (lambda top: top.rmdir(), [], "no such folder"),
        (lambda top: None, ["--out", "/nowhere/x.html"], "--out /nowhere/x.html"),
        (lambda top: None, ["--select-on", "luck"], "'luck'"),
    ],
)
def test_a_mistake_ends_with_one_line(
    prepare: Callable[[Path], object],
    flags: list[str],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    top = tmp_path / "top"
    top.mkdir()
    prepare(top)
    assert cli.run(report.main, [str(top), *flags]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_no_runs_named_is_a_mistake(capsys: pytest.CaptureFixture) -> None:
    assert cli.run(report.main, []) == 2
    assert "RUNS" in capsys.readouterr().err


def test_runs_with_odd_records_are_shown(tmp_path: Path) -> None:
    """From anyone: lines that are no objects, values that are no numbers, a views.png that is not
    a picture, a folder name that is not UTF-8."""
    lines = [{"kind": "train", "epoch": HOSTILE, "loss": "x"}, {"kind": "eval", "top1": True}]
    lines.append({"kind": "eval", "epoch": 1, "top1": 0.5})
    found = measures(0.5) | {HOSTILE: 1.0, "nll": None}
    folder = tmp_path / b"run-\xff".decode(errors="surrogateescape")
    run = write_run(folder, SHAPES, found, lines=lines)  # type: ignore[arg-type]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('5\n[1]\n{"kind": "train", "epoch": 1, "loss": 1e400, "nll": 1e200}\n')
        file.write(
            "[" * 100_000 + '\n{"kind": "train", "epoch": 1, "kl": 1' + "0" * 999 + "}\n{torn"
        )
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"timing": {HOSTILE: HOSTILE}, "environment": [1], "parameters": HOSTILE}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "views.png").write_bytes(b"no picture")
    assert report.main([str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script") == 1
    assert any("views.png: no picture" in text for text in page.texts)
    assert "line line-1 single" in page.attributes("class"), "one point is drawn"
    assert any(r"run-\udcff" in text for text in page.texts)


# --- parts ---


@pytest.mark.parametrize(
    ("value", "known"),
    [
        *((1, 1.0), (0.5, 0.5)),
        *((value, None) for value in (True, "1", None, float("nan"), 10**400)),
    ],
)
def test_only_numbers_are_numbers(value: object, known: float | None) -> None:
    assert number(value) == known


def test_values_as_text() -> None:
    assert mean_cell([0.5, None, 0.7], accuracy=True) == Cell("60.00 [50.00–70.00]", 0.6)  # noqa: RUF001
    assert mean_cell([], accuracy=True) == Cell("–")  # noqa: RUF001
    assert measure_text("tta_top1", 0.5) == "50.00 %"
    assert measure_text("invariance", 0.5) == "0.5"
    assert [duration(s).text for s in (5, 65, 3700)] == ["5 s", "1 min 5 s", "1 h 1 min"]


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(x), 1.0) for x in range(10_001)]
    points[4321] = (4321.0, 99.0)
    points[8765] = (8765.0, -99.0)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS
    assert kept == sorted(kept)
    assert {points[0], points[4321], points[8765], points[-1]} <= set(kept)


def test_of_many_lines_a_share_is_read_and_every_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as lines:
        for step in range(50_000):
            kind = "train" if step % 1000 else "eval"
            lines.write(json.dumps({"kind": kind, "epoch": step, "loss": 1.0}) + " " * 50 + "\n")
    found = list(read_metrics(file))
    assert sum(line["kind"] == "eval" for line in found) == 50
    assert 5000 < len(found) < 20_000
    assert list(read_metrics(tmp_path / "none")) == []


def test_a_plot_fits_its_points_between_the_axes() -> None:
    drawn = plot("loss", {"loss": [(0.0, 3.0), (1.0, 2.0), (2.0, 1.0)]})
    assert drawn is not None
    assert drawn["lines"] == ["60.0,10.0 185.0,73.0 310.0,136.0"]
    assert plot("loss", {"loss": []}) is None
    single = plot("loss", {"loss": [(1.0, 5.0)]})
    assert single is not None
    assert single["lines"] == ["185.0,73.0"], "in the middle"
