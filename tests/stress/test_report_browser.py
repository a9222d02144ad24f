"""The report in a browser: it sorts, filters, highlights and unfolds, and fits a phone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_folders import write_sweep
from webdriver import MISSING, Browser

from fastaug import report

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

COLUMN = """const titles = [...document.querySelectorAll("#runs-table thead th")];
  return titles.findIndex((title) => title.innerText.trim() === arguments[0]) + 1;"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("sweep")
    write_sweep(top)
    assert report.main([str(top)]) == 0
    return top / "report.html"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(started: Browser, page: Path) -> Iterator[Browser]:
    """The page as it opens; whatever a test does with it, the console has nothing to say."""
    started.resize(1300, 900)
    started.open(page)
    yield started
    assert started.log() == []


def until(happens: Callable[[], object]) -> None:
    """Links and events take a moment."""
    end = time.monotonic() + 10
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.02)


def column(browser: Browser, title: str) -> list[str]:
    cells = f"#runs-table tbody tr:not([hidden]) td:nth-child({browser.run(COLUMN, title)})"
    return browser.run(
        "return [...document.querySelectorAll(arguments[0])].map(c => c.innerText)", cells
    )


def test_a_click_on_a_header_sorts_and_another_reverses(browser: Browser) -> None:
    place = browser.run(COLUMN, "--seed")
    header = f"#runs-table th:nth-child({place})"
    sort = "return document.querySelector(arguments[0]).ariaSort"
    before = column(browser, "--seed")
    browser.click(f"{header} button")
    ascending = column(browser, "--seed")
    assert ascending == sorted(before, key=float) != before
    assert browser.run(sort, header) == "ascending"
    browser.click(f"{header} button")
    assert column(browser, "--seed") == ascending[::-1]
    assert browser.run(sort, header) == "descending"
    browser.click("#runs-table th:nth-child(1) button")
    assert browser.run(sort, header) == "none"


def test_numbers_sort_as_numbers_and_missing_ones_come_last(browser: Browser) -> None:
    order = browser.run(
        """const body = document.querySelector("#runs-table tbody");
        const place = arguments[0] - 1;
        const values = ["10", "9", "", "100"];
        [...body.rows].slice(4).forEach((row) => row.remove());
        [...body.rows].forEach((row, i) => {
          row.cells[place].textContent = values[i];
          if (values[i]) row.cells[place].dataset.value = values[i];
          else delete row.cells[place].dataset.value;
        });
        const button = document.querySelectorAll("#runs-table th button")[place];
        return [1, 2].map(() => {
          button.click();
          return [...body.rows].map((row) => row.cells[place].textContent);
        });""",
        browser.run(COLUMN, "top-1 %"),
    )
    assert order == [["9", "10", "100", ""], ["100", "10", "9", ""]]


def test_a_header_is_reached_and_used_by_the_keyboard(browser: Browser) -> None:
    before, place = column(browser, "--views"), browser.run(COLUMN, "--views")
    browser.type(f"#runs-table th:nth-child({place}) button", "\ue007")  # Enter
    assert column(browser, "--views") == sorted(before, key=float) != before


def test_a_row_highlights_the_curves_of_its_run(browser: Browser) -> None:
    lit = """const row = document.querySelector("#runs-table tbody tr");
        row.dispatchEvent(new Event(arguments[0]));
        return [...document.querySelectorAll(".overlaid .lit")].map(
          (line) => line.dataset.run === row.dataset.run);"""
    assert browser.run(lit, "mouseenter") == [True] * 6, "six metrics"
    assert browser.run(lit, "mouseleave") == []


def test_the_legend_highlights_the_curves_of_its_style(browser: Browser) -> None:
    lit = """const key = document.querySelectorAll("[data-style]")[1];
        key.dispatchEvent(new Event("mouseenter"));
        const lines = [...document.querySelectorAll(".overlaid .lit")];
        return [lines.length > 0, lines.every((line) => line.classList.contains("line-2"))];"""
    assert browser.run(lit) == [True, True]


def test_the_filter_leaves_rows_with_all_words(browser: Browser) -> None:
    drawn = """const lines = [...document.querySelectorAll(".overlaid .line")];
        return lines.filter((line) => line.checkVisibility()).length;"""
    assert len(column(browser, "run")) == 9
    assert browser.run(drawn) == 4 * 6, "four runs have curves"
    browser.type("input[data-filters]", "K4 0.02")
    assert sorted(column(browser, "run")) == ["k4-0.02-0", "k4-0.02-1"]
    assert browser.run("return document.querySelector('.filter output').value") == "2 of 9"
    assert browser.run(drawn) == 2 * 6
    browser.type("input[data-filters]", " nothing")
    assert column(browser, "run") == []


def test_a_link_unfolds_the_run_that_it_leads_to(browser: Browser) -> None:
    is_open = """const run = document.getElementById(
          document.querySelector("#runs-table tbody a").hash.slice(1));
        return run.open && run.getBoundingClientRect().top"""
    assert not browser.run(is_open)
    browser.click("#runs-table tbody a")
    until(lambda: browser.run(is_open))
    assert 0 <= browser.run(is_open) < 900, "in sight"
    # Folded and left, the same link leads there again, though the address stays the same.
    browser.run("document.querySelectorAll('details').forEach(d => (d.open = false))")
    browser.click("#runs-table tbody a")
    until(lambda: browser.run(is_open))


def test_an_address_with_a_run_in_it_opens_there(browser: Browser, page: Path) -> None:
    run = browser.run("return document.querySelectorAll('details.run')[3].id")
    browser.open(page.parent / "report.html", f"?again#{run}")
    until(lambda: browser.run("return document.getElementById(arguments[0]).open", run))


def test_names_from_runs_are_not_obeyed(browser: Browser) -> None:
    assert browser.run("return document.title") == "fastaug: run report"
    assert browser.run("return document.scripts.length") == 1


def test_the_policy_stops_what_the_page_did_not_bring(started: Browser, page: Path) -> None:
    started.open(page)
    done = started.run(
        """const script = document.createElement("script");
        script.textContent = "window.caught = true";
        document.body.append(script);
        return window.caught === true;"""
    )
    assert done is False
    said = started.log()
    assert said
    assert all("Content Security Policy" in line for line in said)


@pytest.mark.parametrize("unfolded", [False, True])
@pytest.mark.parametrize("width", [400, 800])
def test_the_page_is_no_wider_than_a_phone(browser: Browser, width: int, unfolded: bool) -> None:
    browser.resize(width, 800)
    if unfolded:
        browser.run("document.querySelectorAll('details').forEach(d => (d.open = true))")
    assert browser.run("return document.documentElement.scrollWidth") == width


def test_the_contents_stay_in_sight(browser: Browser) -> None:
    for width in (1300, 400):
        browser.resize(width, 800)
        browser.run("document.getElementById('runs').scrollIntoView()")
        top = browser.run("return document.querySelector('nav').getBoundingClientRect().top")
        assert top == 0


def test_dark_is_dark(browser: Browser) -> None:
    def background() -> str:
        return browser.run("return getComputedStyle(document.body).backgroundColor")

    light = background()
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.devtools("Emulation.setEmulatedMedia", features=dark)
    try:
        assert light == "rgb(246, 247, 249)"
        assert background() == "rgb(20, 23, 27)"
    finally:
        browser.devtools("Emulation.setEmulatedMedia", features=[])


def test_paper_shows_what_is_folded(browser: Browser) -> None:
    hidden = """const text = document.querySelector("details.run .facts");
        return text.getBoundingClientRect().height === 0 || !text.checkVisibility();"""
    assert browser.run(hidden)
    browser.devtools("Emulation.setEmulatedMedia", media="print")
    try:
        assert not browser.run(hidden)
    finally:
        browser.devtools("Emulation.setEmulatedMedia", media="")
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert not browser.run(hidden), "in browsers without details-content"
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert browser.run(hidden)
