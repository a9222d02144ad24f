"""examples/quickstart.ipynb, executed by Jupyter's own client."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/quickstart.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The code cells after they ran in an empty folder, with fewer steps and without pip."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    install, parameters = (
        next(cell for cell in notebook.cells if tag in cell.metadata.get("tags", ()))
        for tag in ("install", "parameters")
    )
    assert install is next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert install.source.startswith("%pip install ")
    notebook.cells.remove(install)
    parameters.source = "EPOCHS, STEPS = 1, 3"
    # `!python` must be this Python, with this source tree.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "MPLBACKEND": ""}
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        NotebookClient(
            notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
        ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_trains_and_evaluates(executed: list[Any]) -> None:
    printed = "".join(output.get("text", "") for cell in executed for output in cell.outputs)
    assert "epoch 1/1" in printed
    assert "16 views, averaged probabilities" in printed
    assert "step 0: nll " in printed
    assert "'reference': None" in printed
    for problem in ("error:", "Traceback", "No module"):
        assert problem not in printed, printed


def test_it_shows_views_and_curves(executed: list[Any]) -> None:
    pictures = [
        output.data["image/png"]
        for cell in executed
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2


def test_cells_that_need_a_gpu_say_so() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    for before, cell in pairwise(cells):
        if cell.cell_type == "code" and '"cuda")' in cell.source:
            assert "needs a GPU" in before.source
