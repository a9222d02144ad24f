"""Imports go downward only: the layers, from the top, against the imports in the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module may import from layers below its own, and from its own package. Modules of one layer do
# not know each other. The trainer evaluates after each epoch, so evaluation stands below it.
LAYERS = [
    {"__main__"},
    {"train", "evaluate", "preview", "scan", "doctor", "export", "sweep", "figures", "report"},
    {"cli", "exporting", "trainer", "sweeps"},
    {"paper"},
    {"recorder"},
    {"evaluation", "folding", "installed", "learner", "profiler", "run_folder", "saver", "skipped"},
    {"weights"},
    {"loaders", "objectives", "models", "optim", "checkpoint", "telemetry", "console", "picture"}
    | {"announcement"},
    {"pipelines", "machine"},
    {"views"},
    {"data", "kernels"},
    {"device", "interrupt", "options", "recipes", "watchdog", "launch"},
    {"config", "batch", "distributed"},
    {"cache", "folder_lock", "ranges", "whole_file"},
    {"errors"},
]
# `import fastaug` is for anyone's training loop, and needs torch alone.
LIGHT = {"__init__", "batch", "cache", "config", "errors", "kernels", "objectives", "recipes"} | {
    "whole_file"
}


def layer_of(name: str) -> int:
    """0 at the top. The name of a module or package right below fastaug."""
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imports(source: str) -> list[tuple[str, bool]]:
    """(module, whether at the top level of the file) of each import in a source."""
    tree = ast.parse(source)
    top = set(tree.body)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""]
            if node.module == "fastaug":
                names = [f"fastaug.{alias.name}" for alias in node.names]
            found += [(name, node in top) for name in names]
    return found


def violations(part: str, source: str) -> list[str]:
    """What the source of a file of fastaug.PART imports from its own height or above."""
    wrong = []
    for module, _ in imports(source):
        names = module.split(".")
        if names[0] != "fastaug" or len(names) == 1 or names[1] == part:
            continue
        if part != "__init__" and layer_of(names[1]) <= layer_of(part):
            wrong.append(f"fastaug.{part} imports {module}")
    return wrong


def heavy(source: str) -> list[str]:
    """Modules that are imported at the top of a source and are neither torch nor Python's own."""
    import sys

    allowed = {"torch", "fastaug", "__future__", *sys.stdlib_module_names}
    return [m for m, at_top in imports(source) if at_top and m.split(".")[0] not in allowed]


# pipelines/ lies beside fastaug/ and is installed as fastaug.pipelines.
FILES = sorted([*(ROOT / "fastaug").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")])


def part_of(file: Path) -> str:
    if file.is_relative_to(ROOT / "pipelines"):
        return "pipelines"
    return file.relative_to(ROOT / "fastaug").parts[0].removesuffix(".py")


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
def test_import_fastaug_needs_torch_alone(file: Path) -> None:
    assert heavy(file.read_text()) == []
    at_top = {node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)}
    names = {alias.name for node in at_top for alias in node.names}
    assert not names & IMPORTED_ON_USE


def test_dali_is_imported_in_pipelines_alone() -> None:
    found = {
        part_of(file)
        for file in FILES
        for module, _ in imports(file.read_text())
        if module.startswith("nvidia")
    }
    assert found == {"pipelines"}


def test_every_module_has_its_layer() -> None:
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts == set.union(*LAYERS)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("kernels", "from fastaug.objectives import objective"),
        ("data", "import fastaug.trainer"),
        ("models", "from fastaug.optim import build_optimiser"),
        ("objectives", "def f():\n    from fastaug import evaluation"),
        ("config", "from fastaug import recipes"),
    ],
)
def test_an_upward_or_sideways_import_is_found(part: str, source: str) -> None:
    assert violations(part, source)


def test_a_heavy_import_is_found() -> None:
    assert heavy("import timm") == ["timm"]
    assert heavy("def f():\n    import timm") == []
