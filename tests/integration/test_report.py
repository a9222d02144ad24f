"""The report: one page that needs no other file, and a comparison in the terminal."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from run_folders import (
    SCRIPT,
    SHAPES,
    measures,
    metrics_lines,
    training_in,
    write_run,
    write_sweep,
    write_unfinished,
)

from fastaug import cli, report
from fastaug.config import TrainConfig
from fastaug.experiments.metrics_file import read_metrics
from fastaug.experiments.report_console import MAX_ROWS
from fastaug.experiments.report_format import Cell, duration, mean_cell, measure_text, number
from fastaug.experiments.report_page import MAX_COLORS
from fastaug.experiments.report_plots import MAX_POINTS, Series, plot, thinned, ticks

HOSTILE = f'"><img src=x onerror=alert(1)>{SCRIPT}'
FAMILY = "family-wrn-10-1-on-shapes"
SETTING = f"{FAMILY}_k4-losses-kl1.0"
PLAIN = SHAPES.replace(views=4, kl_weight=0.0, validation=0.0)
REGULARIZED = PLAIN.replace(kl_weight=1.0)


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

    def compared(self) -> list[dict[str, str]]:
        """The rows of the comparison, by column."""
        end = self.text.index("</table>", self.text.index('id="runs-table"'))
        header, *rows = Page(self.text[self.text.index('id="runs-table"') - 7 : end]).rows
        return [dict(zip(header, row, strict=True)) for row in rows]


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
    assert row[10].split() == ["0", "1"]
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


def test_a_setting_links_to_its_runs(page: Page) -> None:
    start = page.text.index(f'id="{SETTING}"')
    links = re.findall(r'href="#(run-\w+)"', page.text[start : page.text.index("</tr>", start)])
    assert len(links) == 2
    for run in links:
        start = page.text.index(f'id="{run}"')
        section = page.text[start : page.text.index("</details>", start)]
        assert 'href="#views-shapes-4-crop-flip"' in section


def test_every_run_has_a_row_and_a_section(page: Page) -> None:
    sections = sum(given.get("class") == "run" for _, given in page.tags)
    assert len(page.compared()) == sections == 9


def test_a_run_shows_its_curves_and_its_configuration(page: Page) -> None:
    labels = [label for label in page.attributes("aria-label") if "over the epochs" in label]
    assert "training loss over the epochs: loss ends at 1, nll ends at 0.5, kl ends at 1" in labels
    assert "top-1 accuracy (%), held-out images over the epochs: top-1 ends at 73" in labels
    assert sum("metrics.jsonl" in text for text in page.texts) == 5, "five runs have none"
    assert ["--lr", "0.02"] in page.rows
    assert ["--lr", "0.04"] in page.rows
    assert not any(row[0] == "--momentum" for row in page.rows if row)
    assert sum('"momentum": 0.9' in text for text in page.texts) == 9
    assert any("--momentum 0.9" in text for text in page.texts), "shared by all runs"


def test_views_are_shown_once_and_small(page: Page) -> None:
    (picture,) = [given for tag, given in page.tags if tag == "img"]
    assert "4 views" in str(picture["alt"])
    _, _, data = str(picture["src"]).partition("base64,")
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (1200, 150)


def test_the_page_says_what_it_is_made_from(page: Page, sweep: Path) -> None:
    shown = "".join(page.texts)
    assert "9 runs (8 finished, 1 stopped) in" in shown
    assert str(sweep) in shown


def test_the_same_runs_make_the_same_page_and_the_command_says_where(
    page: Page, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "again.html"
    assert report.main([str(sweep), "--out", str(out)]) == 0
    again = out.read_text(encoding="utf-8")
    minute = re.compile(r"made [^;]*? by fastaug")
    assert minute.sub("", again) == minute.sub("", page.text)
    size = f"{out.stat().st_size / 1000:.0f} kB"
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"{out} ({size})")


@pytest.mark.parametrize(
    ("prepare", "flags", "named"),
    [
        (lambda top: None, [], "{top}"),
        (lambda top: (top / "config.json").write_text("{"), [], "config.json"),
        (lambda top: (top / "metrics.jsonl").touch(), [], "config.json"),
        (lambda top: top.rmdir(), [], "{top}"),
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
    assert named.format(top=top) in line


def test_no_runs_named_is_a_mistake(capsys: pytest.CaptureFixture) -> None:
    assert cli.run(report.main, []) == 2
    assert "RUNS" in capsys.readouterr().err


def test_runs_with_odd_records_are_shown(tmp_path: Path) -> None:
    """From anyone: lines that are no objects, values that are no numbers, a views.png that is not
    a picture, a folder name that is not UTF-8."""
    train, evaluation = {"kind": "train", "step": 1}, {"kind": "eval", "step": 1}
    lines: list[dict] = [train | {"epoch": HOSTILE, "loss": "x"}, evaluation | {"top1": True}]
    lines.append(evaluation | {"epoch": 1, "top1": 0.5})
    found = measures(0.5) | {HOSTILE: 1.0, "nll": None}
    folder = tmp_path / b"run-\xff".decode(errors="surrogateescape")
    run = write_run(folder, SHAPES, found, lines=lines)  # type: ignore[arg-type]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '5\n[1]\n{"kind": "train", "step": 1, "epoch": 1, "loss": 1e400, "nll": 1e200}\n'
        )
        file.write(
            "[" * 100_000
            + '\n{"kind": "train", "step": 1, "epoch": 1, "kl": 1'
            + "0" * 999
            + "}\n{torn"
        )
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"timing": {HOSTILE: HOSTILE}, "environment": [1], "parameters": HOSTILE}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "views.png").write_bytes(b"no picture")
    assert report.main([str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script") == 1
    assert any("views.png" in text for text in page.texts)
    assert "line line-1 single" in page.attributes("class"), "one point is drawn"
    assert any(r"run-\udcff" in text for text in page.texts)


# --- ordinary runs, in any state ---


def written(top: Path) -> Page:
    assert report.main([str(top)]) == 0
    return Page((top / "report.html").read_text(encoding="utf-8"))


def write_pair(top: Path) -> None:
    """Two runs, with and without the regularizer, as a demo makes them."""
    for name, config, top1, invariance in (
        ("with-kl", REGULARIZED, 0.982, 0.206),
        ("without-kl", PLAIN, 0.948, 0.559),
    ):
        found = measures(top1, invariance=invariance)
        write_run(top / name, config, found, lines=metrics_lines(4, top1))


def test_runs_in_any_state_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "done", PLAIN, measures(0.9), lines=metrics_lines(4, 0.9))
    lines = metrics_lines(2, 0.5)
    half = PLAIN.replace(lr=0.5)
    write_unfinished(tmp_path / "stopped", half, lines)
    running = write_unfinished(tmp_path / "running", half.replace(validation=0.2), lines)
    write_unfinished(tmp_path / "begun", half, lines[:1])
    write_unfinished(tmp_path / "empty", half)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with training_in(running):
        page = written(tmp_path)
    rows = {row["run"]: row for row in page.compared()}
    assert set(rows) == {"done", "stopped", "running", "begun", "empty"}
    assert rows["done"]["state"] == "finished"
    assert rows["done"]["top-1 %"] == "90.00"
    assert rows["done"]["train time"] == "1 min 0 s"
    # The last evaluation, at epoch 2, of 4 epochs of 25 steps.
    assert rows["stopped"]["state"] == "stopped 50/100epoch 2, test images"
    assert rows["running"]["state"] == "running 50/100epoch 2, held-out images"
    for name in ("stopped", "running"):
        assert rows[name]["top-1 %"] == "50.00"
        assert (rows[name]["nll"], rows[name]["invariance"]) == ("0.7", "0.5")
        assert (rows[name]["training loss"], rows[name]["views/s"]) == ("1", "1,050")
    assert rows["begun"]["state"] == "stopped 25/100"
    assert (rows["begun"]["top-1 %"], rows["begun"]["training loss"]) == ("–", "1.5")  # noqa: RUF001
    assert rows["empty"]["state"] == "stopped at step 0"
    shown = "".join(page.texts)
    assert "1 folder skipped" in shown
    assert str(tmp_path / "broken") in shown
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("running")]
    assert line.split()[-6:] == ["50.0%*", "–", "0.500*", "1.000", "running", "50/100"]  # noqa: RUF001
    assert str(tmp_path / "broken") in printed


def test_differing_settings_are_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "a", PLAIN.replace(lr=0.1), measures(0.5))
    write_run(tmp_path / "b", PLAIN.replace(lr=0.2, average="probs", workers=5), measures(0.7))
    write_run(tmp_path / "c", PLAIN.replace(lr=0.2, data="/elsewhere/shapes"), measures(0.6))
    page = written(tmp_path)
    rows = page.compared()
    assert [row["run"] for row in rows] == ["b", "c", "a"], "best top-1 first"
    assert [row["--lr"] for row in rows] == ["0.2", "0.2", "0.1"]
    assert [row["--average"] for row in rows] == ["probs", "losses", "losses"]
    assert [name for name in rows[0] if name.startswith("--")] == ["--average", "--lr"]
    assert "also differ in --workers" in "".join(page.texts)
    best = re.findall(r'<td class="number best"[^>]*>([^<]+)<', page.text)
    assert best == ["70.00", "72.00", "0.3"], "top-1, TTA and invariance; all have the same nll"


def test_ordinary_runs_have_nothing_of_the_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pair(tmp_path)
    page = written(tmp_path)
    body = page.text[page.text.index("<body>") :].replace(str(tmp_path), "")
    text = (body + capsys.readouterr().out.replace(str(tmp_path), "")).lower()
    for word in ("botev", "claim", "paper", "not run", "toy"):
        assert word not in text
    assert not {"paper", "figures", "tables"} & set(page.ids)
    order = [id for id in page.ids if id in ("comparison", "curves", "views", "runs")]
    assert order == ["comparison", "curves", "runs"], "they have no views.png"


def test_a_sweep_has_the_paper_s_claims_after_the_comparison(page: Page) -> None:
    parts = ["comparison", "curves", "views", "paper", FAMILY, "figures", "tables", "runs"]
    assert [id for id in page.ids if id in parts] == parts
    assert "Botev" in "".join(page.texts)
    assert not any("script" in id for id in page.ids if id.startswith("family-")), "one run"


def test_two_runs_that_differ_in_one_setting_say_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pair(tmp_path)
    page = written(tmp_path)
    effect = (
        "--kl-weight 1 instead of 0: top-1 98.2% vs 94.8% (+3.4 points), "
        "invariance 0.206 vs 0.559 nats (lower is more invariant)."
    )
    lines = capsys.readouterr().out.splitlines()
    assert effect in " ".join(line.strip() for line in lines)
    assert all(len(line.rstrip()) <= 80 for line in lines[:-1])
    assert any(effect in text for text in page.texts)
    titles = ["top-1", "TTA", "top-1", "invariance", "state"]
    assert lines[0].split() == ["run", "--kl-weight", *titles]
    assert lines[1].split() == ["with-kl", "1", "98.2%", "100.2%", "0.206", "finished"]
    assert lines[2].split() == ["without-kl", "0", "94.8%", "96.8%", "0.559", "finished"]


def test_the_larger_value_comes_first_also_if_it_is_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", PLAIN.replace(views=2), measures(0.9))
    write_run(tmp_path / "b", PLAIN.replace(views=4, workers=7), measures(0.8))
    written(tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "--views 4 instead of 2: top-1 80.0% vs 90.0% (-10.0 points)" in printed


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"kl_weight": 1.0}])
def test_other_runs_have_no_such_sentence(
    change: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two settings differ, or none."""
    write_run(tmp_path / "a", REGULARIZED, measures(0.9))
    write_run(tmp_path / "b", PLAIN.replace(**change), measures(0.8))
    written(tmp_path)
    assert "instead of" not in capsys.readouterr().out


def test_an_unfinished_run_is_named_in_the_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", REGULARIZED, measures(0.9))
    write_unfinished(tmp_path / "b", PLAIN, metrics_lines(2, 0.6))
    written(tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "top-1 90.0% vs 60.0% (+30.0 points)" in printed
    assert "b (stopped at step 50 of 100)" in printed


def test_curves_have_a_line_for_each_run_and_a_legend(tmp_path: Path) -> None:
    write_pair(tmp_path)
    page = written(tmp_path)
    label = "top-1 accuracy (%), test images over the epochs: --kl-weight 1 ends at 98.2, "
    assert f"{label}--kl-weight 0 ends at 94.8" in page.attributes("aria-label")
    keys = [given["data-style"] for _, given in page.tags if "data-style" in given]
    assert keys == ["1", "2"]
    runs = [
        given["data-run"] for tag, given in page.tags if tag == "polyline" and "data-run" in given
    ]
    assert len(set(runs)) == 2
    assert len(runs) == 2 * 6, "six metrics"


def test_many_runs_are_colored_by_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in range(MAX_ROWS + 5):
        config = PLAIN.replace(seed=place, kl_weight=float(place % 2))
        folder = tmp_path / f"run-{place:02}"
        write_run(folder, config, measures(place / 100), lines=metrics_lines(4, place / 100))
        for file in folder.iterdir():
            os.utime(file, (1000 + place, 1000 + place))
    page = written(tmp_path)
    styles = {given["data-style"] for _, given in page.tags if "data-style" in given}
    assert styles == {"1", "2"}
    shown = "".join(page.texts)
    assert "--kl-weight 0 (13 runs)" in shown
    assert "--kl-weight 1 (12 runs)" in shown
    assert len(page.compared()) == MAX_ROWS + 5
    lines = capsys.readouterr().out.splitlines()
    named = [line.split()[0] for line in lines if line.startswith("run-")]
    assert named == [f"run-{place:02}" for place in reversed(range(5, MAX_ROWS + 5))], "newest"


# From 82 characters on there is room for --seed, too.
@pytest.mark.parametrize("width", [80, 81, 82, 83, 120])
def test_a_long_name_leaves_room_for_the_measures(
    width: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for seed in range(2):
        folder = tmp_path / f"{'long-' * 20}s{seed}"
        write_run(folder, PLAIN.replace(seed=seed), measures(0.9))
    written(tmp_path)
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[:3]]
    assert ("--seed" in head) == (width >= 82)
    assert {row[0][-8:] for row in rows} == {"-long-s0", "-long-s1"}
    assert all("90.0%" in row and row[-1] == "finished" for row in rows)


def test_many_runs_without_a_setting_to_color_by_have_the_best_in_color(tmp_path: Path) -> None:
    for seed in range(MAX_COLORS + 3):
        folder = tmp_path / str(seed)
        config = PLAIN.replace(lr=0.1 + seed, seed=seed % 2)
        write_run(folder, config, measures(seed / 100), lines=metrics_lines(1, 1))
    page = written(tmp_path)
    styles = [given["data-style"] for _, given in page.tags if "data-style" in given]
    assert styles == [*map(str, range(1, MAX_COLORS + 1)), "0"]
    assert "3 other runs" in "".join(page.texts)


def test_a_real_run_that_was_stopped(
    tiny: Callable[..., TrainConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastaug.engine.trainer import Trainer

    trainer = Trainer(tiny(max_steps=1, out=str(tmp_path / "real")))
    trainer.fit()
    (row,) = written(tmp_path).compared()
    assert row["state"] == f"stopped 1/{trainer.total_steps}"
    top1 = json.loads((tmp_path / "real/summary.json").read_text())["measures"]["top1"]
    assert row["top-1 %"] == f"{100 * top1:.2f}"


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
            record = {"kind": kind, "step": step, "epoch": step, "loss": 1.0}
            lines.write(json.dumps(record) + " " * 50 + "\n")
    found, problem = read_metrics(file)
    steps = [record["step"] for record in found]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1], problem) == (0, 49_999, "")
    assert [record["step"] for record in found if record["kind"] == "eval"] == [
        *range(0, 50_000, 1000)
    ]
    assert 5000 < len(found) <= 10_051
    assert read_metrics(tmp_path / "none") == ([], "")


def test_a_plot_fits_its_points_between_the_axes() -> None:
    drawn = plot("loss", [Series("loss", [(0.0, 3.0), (1.0, 2.0), (2.0, 1.0)], 1)])
    assert drawn is not None
    frame, (line,) = drawn["frame"], drawn["lines"]
    (x0, y0), (x1, y1), (x2, y2) = [map(float, p.split(",")) for p in line["points"].split()]
    assert (x0, x2) == (frame["left"], frame["right"])
    assert frame["top"] < y0 < y1 < y2 < frame["bottom"], "with a margin; 3 is above 1"
    assert x1 - x0 == x2 - x1
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    assert [text for _, text in drawn["y_ticks"]] == ["1", "1.5", "2", "2.5", "3"]
    assert float(drawn["y_ticks"][0][0]) == y2
    assert plot("loss", [Series("loss", [], 1)]) is None
    single = plot("loss", [Series("loss", [(0.0, 5.0)], 1)])
    assert single is not None
    middle = (frame["top"] + frame["bottom"]) / 2
    assert single["lines"][0]["points"].endswith(f",{middle:.1f}")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 5, 10]),
        (0, 100, [0, 50, 100]),
        (0.05, 0.52, [0.1, 0.2, 0.3, 0.4, 0.5]),
        (-1.1, 0.9, [-1, -0.5, 0, 0.5]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)
