"""The documentation: generated pages are current, links of plain Markdown lead to files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from fastaug.__main__ import COMMANDS
from fastaug.config import TrainConfig, free_on_resume, setting_owners
from fastaug.data.readers.remote import RemoteReader
from fastaug.data.sources import READERS
from fastaug.settings import flag

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FLAGS = DOCS / "reference" / "flags.md"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])


def load_generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_flags_is_current() -> None:
    assert load_generator("generate_flags").page() == FLAGS.read_text(encoding="utf-8"), (
        "run make docs"
    )


def test_the_page_of_flags_has_every_setting() -> None:
    """Read from the page's text; the config is the oracle."""
    lines = [line for line in FLAGS.read_text().splitlines() if line.startswith("| `--")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    found = {row[0].strip("`"): row for row in rows}
    assert set(found) == {flag(name) for name in setting_owners()}
    assert all(len(row) == 5 and row[4] for row in found.values())
    for name in setting_owners():
        assert found[flag(name)][3] == ("yes" if name in free_on_resume() else "no")
    assert found["--lr"][1] == f"`{TrainConfig().optim.lr}`"
    assert found["--average"][2] == "`losses`, `probs`, `logits`"
    assert found["--momentum"][2] == "number, at least 0 and below 1"


def test_the_table_of_layouts_is_current() -> None:
    page = load_generator("generate_layouts").page()
    assert page == (DOCS / "guide/data.md").read_text(encoding="utf-8"), "run make docs"


def test_the_table_of_layouts_has_every_reader() -> None:
    """Read from the page's text: a row for each name and layout."""
    lines = (DOCS / "guide/data.md").read_text().splitlines()
    rows = [tuple(line.strip("| ").split(" | ")) for line in lines if line.startswith("| ")]
    for reader in (*READERS, RemoteReader):
        assert reader.LAYOUT
        assert set(reader.LAYOUT) <= set(rows), reader.DESCRIPTION
    assert rows.count(("`--data`", "layout")) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """As plain Markdown on a code host; make docs checks the site, and anchors."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_source_files_that_pages_name_exist() -> None:
    missing = []
    for page in PAGES:
        for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|h|cu|cpp|c))\b", page.read_text()):
            places = (ROOT / name, ROOT / "fastaug" / name, ROOT / "fastaug/data" / name)
            if not any(place.exists() for place in places) and "NAME" not in name:
                missing.append(f"{page.name}: {name}")
    assert [name for name in missing if "FORMAT" not in name] == []


def test_every_command_is_on_the_page_of_commands() -> None:
    text = (DOCS / "reference/commands.md").read_text()
    assert [name for name in COMMANDS if f"| `fastaug.{name}" not in text] == []


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs checks it as well, where it is installed."""
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))
