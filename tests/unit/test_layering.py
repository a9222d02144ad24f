"""Imports go downward only: the layers, from the top, against the imports in the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from source_imports import imports

ROOT = Path(__file__).parents[2]
# A package may import from the layers below its own, and from its own layer as long as the packages
# of that layer import each other in one direction only.
LAYERS = [
    {"__main__", "train", "evaluate", "predict", "preview", "scan", "pack", "export", "doctor"}
    | {"sweep", "figures", "report"},
    {"engine", "exporters", "diagnostics", "experiments", "cli"},
    {"runs", "data", "pipelines", "models", "recipes"},
    {"views", "kernels"},
    {"toolchain", "runtime"},
    {"config", "settings", "normalization", "errors", "urls", "startup"},
]
# `import fastaug` is for anyone's training loop, and needs torch only.
LIGHT = {"__init__", "config", "settings", "normalization", "errors", "urls"}
LIGHT |= {"kernels", "recipes", "runtime", "startup", "toolchain"}


def layer_of(name: str) -> int:
    """0 at the top. The name of a module or package right below fastaug."""
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imported_parts(part: str, source: str) -> set[str]:
    """The other modules or packages of fastaug that a file of fastaug.PART imports."""
    modules = [m.split(".") for m, _ in imports(source) if m.startswith("fastaug.")]
    return {_part(names[1:]) for names in modules} - {part}


def _part(names: list[str]) -> str:
    """A module or package right below fastaug; PACKAGE.config belongs to config.

    A component's settings are declared beside it, and import nothing but the bottom layer.
    """
    return "config" if names[-1] == "config" else names[0]


def violations(part: str, source: str) -> list[str]:
    """What the source of a file of fastaug.PART imports from a layer above its own."""
    if part == "__init__":
        return []
    found = sorted(imported_parts(part, source))
    return [
        f"fastaug.{part} imports fastaug.{name}"
        for name in found
        if layer_of(name) < layer_of(part)
    ]


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """The parts that import one another, directly or through others."""
    reached = {part: set(direct) for part, direct in edges.items()}
    for middle in edges:
        for part in edges:
            if middle in reached[part]:
                reached[part] |= reached[middle]
    return sorted(part for part in edges if part in reached[part])


def heavy(source: str) -> list[str]:
    """Modules that are imported at the top of a source and are neither torch nor Python's own."""
    import sys

    allowed = {"torch", "fastaug", "__future__", *sys.stdlib_module_names}
    return [m for m, at_top in imports(source) if at_top and m.split(".")[0] not in allowed]


# pipelines/ lies beside fastaug/ and is installed as fastaug.pipelines.
FILES = sorted([*(ROOT / "fastaug").rglob("*.py"), *(ROOT / "pipelines").glob("*.py")])


def part_of(file: Path) -> str:
    if file.is_relative_to(ROOT / "pipelines"):
        return "pipelines"
    return _part([name.removesuffix(".py") for name in file.relative_to(ROOT / "fastaug").parts])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_downward(file: Path) -> None:
    assert violations(part_of(file), file.read_text()) == []


# Programs in the languages of other packages, imported by the function that runs them.
IMPORTED_ON_USE = {"triton_program"}


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if part_of(file) in LIGHT and file.stem not in IMPORTED_ON_USE],
    ids=lambda file: file.name,
)
def test_import_fastaug_needs_only_torch(file: Path) -> None:
    assert heavy(file.read_text()) == []
    at_top = {node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)}
    names = {alias.name for node in at_top for alias in node.names}
    assert not names & IMPORTED_ON_USE


def test_only_pipelines_imports_dali() -> None:
    found = {
        part_of(file)
        for file in FILES
        for module, _ in imports(file.read_text())
        if module.startswith("nvidia")
    }
    assert found == {"pipelines"}


def test_packages_do_not_import_each_other_in_circles() -> None:
    edges: dict[str, set[str]] = {}
    for file in FILES:
        part = part_of(file)
        if part != "__init__":
            edges.setdefault(part, set()).update(imported_parts(part, file.read_text()))
    assert cycles(edges) == []


def test_nothing_but_its_commands_imports_experiments() -> None:
    users = {
        part_of(f) for f in FILES if "experiments" in imported_parts(part_of(f), f.read_text())
    }
    assert users <= {"sweep", "figures", "report", "experiments"}


def test_every_module_has_its_layer() -> None:
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts == set.union(*LAYERS)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("kernels", "from fastaug.engine.trainer import Trainer"),
        ("data", "import fastaug.engine.loaders"),
        ("views", "def f():\n    from fastaug.data import scan"),
        ("config", "from fastaug import recipes"),
    ],
)
def test_an_upward_import_is_found(part: str, source: str) -> None:
    assert violations(part, source)


def test_a_cycle_is_found() -> None:
    assert cycles({"runs": {"data"}, "data": {"views"}, "views": {"runs"}, "cli": {"runs"}}) == [
        *("data", "runs", "views"),
    ]


def test_a_heavy_import_is_found() -> None:
    assert heavy("import timm") == ["timm"]
    assert heavy("def f():\n    import timm") == []
