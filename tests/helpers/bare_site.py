"""A folder of packages that has only some of those that are installed here."""

from __future__ import annotations

from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def with_requirements(*names: str) -> dict[str, Distribution]:
    """Installed distributions and what they require, by name."""
    found: dict[str, Distribution] = {}
    unread = list(names)
    while unread:
        name = unread.pop()
        if name not in found:
            found[name] = distribution(name)
            needed = map(Requirement, found[name].requires or ())
            environment = {"extra": ""}
            unread += [
                each.name
                for each in needed
                if each.marker is None or each.marker.evaluate(environment)
            ]
    return found


def link_distributions(folder: Path, *names: str) -> Path:
    """Link the files of distributions and of their requirements into a folder."""
    folder.mkdir(parents=True)
    for found in with_requirements(*names).values():
        root = Path(str(found.locate_file("")))
        places = {_place(file.parts) for file in found.files or () if file.parts[0] != ".."}
        for place in sorted(places):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / place).exists():
                (folder / place).symlink_to(root / place)
    return folder


def _place(parts: tuple[str, ...]) -> Path:
    """What is linked for a file: its package, or the package's part in a shared namespace."""
    return Path(*parts[: 2 if parts[0] in ("nvidia", "cuda") else 1])
