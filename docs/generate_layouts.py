"""Write the table of data layouts into docs/guide/data.md from the readers of fastaug.

    python docs/generate_layouts.py

make docs runs it; tests/unit/test_docs.py fails if the committed table is not what it writes.
"""

from __future__ import annotations

from pathlib import Path

from fastaug.data import shapes
from fastaug.data.readers import folder
from fastaug.data.readers.remote import RemoteReader
from fastaug.data.sources import READERS

PAGE = Path(__file__).parent / "guide" / "data.md"
BEGIN = "<!-- written by docs/generate_layouts.py from the LAYOUT of each reader -->\n"
END = "<!-- end of the table -->\n"


def table() -> str:
    """The built-in set and class folders, then the rows of the other readers in their order."""
    readers = sorted(READERS, key=lambda reader: reader is not folder)
    rows = [shapes.LAYOUT, *(row for reader in readers for row in reader.LAYOUT)]
    rows += RemoteReader.LAYOUT
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(["| `--data` | layout |", "|---|---|", *lines]) + "\n"


def page() -> str:
    """The page with the current table."""
    head, found, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{PAGE} has no place for the table: {BEGIN.strip()} ... {END.strip()}")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
