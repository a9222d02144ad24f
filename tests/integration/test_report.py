"""The report: one page that needs nothing else, whose links lead somewhere and whose numbers are
those of the runs."""

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
from run_folders import write_run

from fastaug import cli, report
from fastaug.config import TrainConfig
from fastaug.experiments.page_curves import MOST_POINTS, plot, read_records, thinned
from fastaug.experiments.page_html import Cell, Column, Markup, element, join, table
from fastaug.experiments.page_values import duration, measure_text, number, spread

BASE = TrainConfig.from_flat(
    recipe="shapes", model="wrn-10-1", data="/data/shapes", validation=0.1, epochs=4, views=1
)
SCRIPT = "<script>document.title = 'caught'</script>"
HOSTILE = f'"><img src=x onerror=alert(1)>{SCRIPT}'


def measures(top1: float, invariance: float = 0.3) -> dict[str, float]:
    accuracies = {"top1": top1, "top5": top1 + 0.1, "tta_top1": top1 + 0.02}
    more = {f"tta_top1_at_{views}": top1 + 0.01 for views in (1, 2, 4)}
    return {**accuracies, **more, "nll": 1 - top1, "invariance": invariance}


def records(epochs: int, final: float) -> list[dict]:
    lines = []
    for epoch in range(1, epochs + 1):
        share = epoch / epochs
        lines.append(
            {"kind": "train", "epoch": epoch, "loss": 2 - share, "nll": 1.5 - share, "kl": share}
        )
        lines.append({"kind": "eval", "epoch": epoch, "top1": share * final, "invariance": 0.5})
    return lines


def write_sweep(top: Path) -> None:
    """Two families; in the first, the larger rate is the better one by the held-out images and the
    worse one by the test images."""
    # (lr, seed) -> top-1 of the test images
    found = {(0.04, 0): 0.70, (0.04, 1): 0.73, (0.02, 0): 0.80, (0.02, 1): 0.82}
    for (lr, seed), top1 in found.items():
        config = BASE.replace(views=4, lr=lr, seed=seed, kl_weight=1.0)
        held_out = measures(0.75 if lr == 0.04 else 0.60)
        run = write_run(top / f"k4-{lr}-{seed}", config, measures(top1), held_out, records(4, top1))
        Image.new("RGB", (2400, 300), "teal").save(run / "views.png")
    write_run(top / "k1", BASE, measures(0.65), measures(0.64))
    other = BASE.replace(model="wrn-16-4", recipe=SCRIPT, data=f"/data/{SCRIPT}".replace("</", "<"))
    write_run(top / 'odd"<b>&amp;', other, measures(0.5), measures(0.5))
    unfinished = top / f"half-{SCRIPT}".replace("/", "")
    unfinished.mkdir()
    (unfinished / "config.json").write_text(json.dumps(BASE.to_flat()))


class Page(HTMLParser):
    """What the tests ask a page for."""

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
    assert set(inside) <= set(page.ids)
    used = re.findall(r"url\(#([^)]+)\)", page.text)
    assert used, "figures clip their lines"
    assert set(used) <= set(page.ids)


def test_nothing_is_fetched_from_anywhere(page: Page) -> None:
    addresses = [value for name in ("src", "href", "xlink:href") for value in page.attributes(name)]
    assert all(value.startswith(("#", "data:")) for value in addresses)
    without_names = re.sub(r' xmlns(:\w+)?="[^"]*"', "", page.text)
    assert not re.search(r"https?://|@import|url\((?!#)", without_names)


def test_the_policy_admits_the_script_and_no_network(page: Page) -> None:
    policy = next(
        str(given["content"])
        for tag, given in page.tags
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy"
    )
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
    row = page.row("family-wrn-10-1-on-shapes_k4-losses-kl1.0")
    assert row[:10] == [
        *("4", "losses", "1", "0.04", "4", "2"),
        "71.50 [70.00–73.00]",  # noqa: RUF001
        "73.50 [72.00–75.00]",  # noqa: RUF001
        "0.3 [0.3–0.3]",  # noqa: RUF001
        "validation, best of 2",
    ]
    assert row[10].split() == ["0", "1", "all", "4"]


def test_select_on_test_takes_the_other_rate(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "by-test.html"
    assert report.main([str(sweep), "--select-on", "test", "--out", str(out)]) == 0
    row = Page(out.read_text(encoding="utf-8")).row("family-wrn-10-1-on-shapes_k4-losses-kl1.0")
    assert row[3] == "0.02"
    assert row[6].startswith("81.00 ")
    assert row[9] == "test, best of 2"


def test_settings_and_runs_link_to_each_other(page: Page) -> None:
    setting = "family-wrn-10-1-on-shapes_k4-losses-kl1.0"
    start = page.text.index(f'id="{setting}"')
    links = re.findall(r'href="#(run-\w+)"', page.text[start : page.text.index("</tr>", start)])
    assert len(links) == 2
    for run in links:
        start = page.text.index(f'id="{run}"')
        section = page.text[start : page.text.index("</details>", start)]
        assert f'href="#{setting}"' in section
        assert 'href="#family-wrn-10-1-on-shapes_views-4-crop-flip"' in section


def test_every_run_has_a_row_and_a_section(page: Page) -> None:
    start = page.text.index('id="runs-table"')
    rows = page.text[start : page.text.index("</table>", start)].count("<tr>") - 1
    sections = sum(given.get("class") == "run" for _, given in page.tags)
    assert rows == sections == 6


def test_a_run_shows_its_course(page: Page) -> None:
    labels = [label for label in page.attributes("aria-label") if "over the epochs" in label]
    assert "training loss over the epochs: loss ends at 1, nll ends at 0.5, kl ends at 1" in labels
    assert "top-1 in %, held-out images over the epochs: top-1 ends at 73" in labels
    assert "No course of the training: no metrics.jsonl." in page.texts


def test_a_run_shows_what_it_differs_in_and_all_of_its_configuration(page: Page) -> None:
    assert ["--lr", "0.02"] in page.rows
    assert ["--lr", "0.04"] in page.rows
    assert not any(row[0] == "--momentum" for row in page.rows if row)
    assert sum('"momentum": 0.9' in text for text in page.texts) == 6
    assert any("--momentum 0.9" in text for text in page.texts), "shared by all runs"


def test_views_are_shown_once_and_small(page: Page) -> None:
    pictures = [given for tag, given in page.tags if tag == "img"]
    assert len(pictures) == 1
    assert "4 views" in str(pictures[0]["alt"])
    _, _, data = str(pictures[0]["src"]).partition("base64,")
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (1200, 150)


def test_the_page_says_what_it_is_made_from(page: Page, sweep: Path) -> None:
    shown = "".join(page.texts)
    assert "6 finished runs in 2 families" in shown
    assert str(sweep) in shown
    assert "1 run folder without a result" in shown
    assert "not finished: it has no summary.json" in shown


def test_the_same_runs_make_the_same_page_and_it_says_where(
    page: Page, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "again.html"
    assert report.main([str(sweep), "--out", str(out)]) == 0
    again = out.read_text(encoding="utf-8")
    minute = re.compile(r"made [^;]*? by fastaug")
    assert minute.sub("", again) == minute.sub("", page.text)
    said = capsys.readouterr().out
    size = f"{out.stat().st_size / 1000:.0f} kB"
    assert said.endswith(f"\n6 runs (1 unfinished): {out} ({size})\n")


@pytest.mark.parametrize(
    ("prepare", "flags", "message"),
    [
        (lambda top: None, [], "no run folder in it"),
        (lambda top: (top / "config.json").write_text("{"), [], "no finished run among 1"),
        (lambda top: top.rmdir(), [], "no such folder"),
        (lambda top: None, ["--out", "/nowhere/x.html"], "must be a file in a folder"),
        (lambda top: None, ["--select-on", "luck"], "invalid choice 'luck'"),
    ],
)
def test_a_mistake_ends_with_one_line(
    prepare: Callable[[Path], object],
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    top = tmp_path / "top"
    top.mkdir()
    prepare(top)
    assert cli.run(report.main, [str(top), *flags]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_no_runs_named_is_a_mistake(capsys: pytest.CaptureFixture) -> None:
    assert cli.run(report.main, []) == 2
    assert "RUNS" in capsys.readouterr().err


def test_runs_with_odd_records_are_shown(tmp_path: Path) -> None:
    """Whoever made them: lines that are no objects, values that are no numbers, no picture."""
    lines = [{"kind": "train", "epoch": HOSTILE, "loss": "x"}, {"kind": "eval", "top1": True}]
    found = measures(0.5) | {HOSTILE: 1.0, "nll": None}
    run = write_run(tmp_path / "run", BASE, found, records=lines)  # type: ignore[arg-type]
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
    assert any("no picture (cannot identify image file" in text for text in page.texts)


def test_a_name_that_is_no_utf8_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / b"run-\xff".decode(errors="surrogateescape")
    write_run(folder, BASE, measures(0.5))
    assert report.main([str(tmp_path)]) == 0
    assert r"run-\udcff" in (tmp_path / "report.html").read_text(encoding="utf-8")


# --- parts ---


def test_text_is_escaped_and_markup_is_not() -> None:
    made = element("p", "<&", element("b", "bold"), title='"<', hidden=True, id=None)
    assert made == '<p title="&quot;&lt;" hidden>&lt;&amp;<b>bold</b></p>'
    assert join([Markup("<br>"), "<"], " & ") == "<br> &amp; &lt;"
    assert not isinstance(made + "x", Markup), "text again: it would be escaped"


def test_a_table_knows_what_to_sort_by() -> None:
    made = table([Column("n", "number")], [("a", [Cell("71.50", 0.715)])], label="x")
    assert '<td class="number" data-value="0.715">71.50</td>' in made


@pytest.mark.parametrize(
    ("value", "known"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, None),
        ("1", None),
        (None, None),
        (float("nan"), None),
        (10**400, None),
    ],
)
def test_only_numbers_are_numbers(value: object, known: float | None) -> None:
    assert number(value) == known


def test_values_as_text() -> None:
    assert spread([0.5, None, 0.7], accuracy=True) == Cell("60.00 [50.00–70.00]", 0.6)  # noqa: RUF001
    assert spread([], accuracy=True) == Cell("–")  # noqa: RUF001
    assert measure_text("tta_top1", 0.5) == "50.00 %"
    assert measure_text("invariance", 0.5) == "0.5"
    assert [duration(s).content for s in (5, 65, 3700)] == ["5 s", "1 min 5 s", "1 h 1 min"]


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(x), 1.0) for x in range(10_001)]
    points[4321] = (4321.0, 99.0)
    points[8765] = (8765.0, -99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert kept == sorted(kept)
    assert {points[0], points[4321], points[8765], points[-1]} <= set(kept)


def test_of_many_records_a_share_is_read_and_every_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as lines:
        for step in range(50_000):
            kind = "train" if step % 1000 else "eval"
            lines.write(json.dumps({"kind": kind, "epoch": step, "loss": 1.0}) + " " * 50 + "\n")
    found = list(read_records(file))
    assert sum(record["kind"] == "eval" for record in found) == 50
    assert 5000 < len(found) < 20_000
    assert list(read_records(tmp_path / "none")) == []


def test_a_plot_fits_its_points_between_the_axes() -> None:
    drawn = plot("loss", {"loss": [(0.0, 3.0), (1.0, 2.0), (2.0, 1.0)]})
    assert 'points="48.0,10.0 179.0,73.0 310.0,136.0"' in drawn
    assert plot("loss", {"loss": []}) == ""
    assert 'points="179.0,73.0"' in plot("loss", {"loss": [(1.0, 5.0)]}), "in the middle"
