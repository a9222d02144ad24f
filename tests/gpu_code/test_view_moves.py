"""Moves of the view kernel on a GPU: integer coordinates decide what fp64 would have decided."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated_gpu import EmulatedViews

from fastaug.runtime.device import cpp_compiler
from fastaug.toolchain.build import source_folder
from fastaug.views.native import NativeViews
from fastaug.views.packed_plan import pictures_of
from fastaug.views.plan import ViewPlans
from fastaug.views.randaugment import MAX_ARGUMENTS, NAMES
from fastaug.views.render_spec import RenderSpec

PROGRAM = Path(__file__).parents[1] / "helpers/fuzz_moves.cpp"


def fuzz(sources: Path, folder: Path) -> list[int]:
    """Places, those that are close to an integer, wrong ones, matrices that do not fit."""
    compiler = cpp_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", f"-I{sources}"]
    subprocess.run([compiler, *flags, str(PROGRAM), "-o", str(folder / "fuzz")], check=True)
    done = subprocess.run([folder / "fuzz"], capture_output=True, text=True)
    return [int(number) for number in re.findall(r"\d+", done.stdout)]


def test_integers_decide_as_fp64_or_leave_it_to_fp64(tmp_path: Path) -> None:
    places, close, wrong, unfit = fuzz(source_folder(), tmp_path)
    assert places > 10_000_000
    assert 0 < close < places // 4  # a sixth of the matrices is made to be close
    assert wrong == 0
    assert unfit > 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(unsigned)u + 2u * size < 4u * size", "(unsigned)u + 1u < 2u"),
        ("if (exponent > 14) fits = false;", ""),
        ("bits < 0 ? -units : units", "units"),
    ],
    ids=["a bound that is too small", "matrices out of range", "signs"],
)
def test_a_wrong_bound_is_seen(right: str, wrong: str, tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_folder(), sources)
    text = (sources / "moves.h").read_text()
    assert text.count(right) == 1
    (sources / "moves.h").write_text(text.replace(right, wrong))
    assert fuzz(sources, tmp_path)[2] > 0


@pytest.mark.parametrize("size", [12, 11])
def test_positions_on_an_integer_are_left_to_fp64(size: int) -> None:
    """A translation that ends on whole pixels, and matrices out of the integers' range."""
    on_integer = 3 - 0.5 - 2.0**-8  # randaugment adds 0.5 and a tie of 2^-8
    drawn = [
        *(("translate_x", v) for v in (on_integer, np.nextafter(on_integer, 0), -1e9, 2.0**30)),
        *(("translate_y", v) for v in (on_integer, np.nextafter(on_integer, 9), 1e9, -(2.0**30))),
        *(("shear_y", v) for v in (1 / 3, -(2.0**-8), 40.0, 1e5)),
        *(("rotate", v) for v in (90.0, 45.0, 180.0, 1e-9)),
    ]
    operations = np.array([[[NAMES.index(name)] for name, _ in drawn]], np.int32)
    arguments = np.zeros((*operations.shape, MAX_ARGUMENTS))
    arguments[0, :, 0, 0] = [value for _, value in drawn]
    boxes = np.tile(np.array([0, 0, size, size], np.int32), (1, len(drawn), 1))
    plans = ViewPlans(boxes, np.zeros((1, len(drawn)), bool), operations, arguments, size)
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (size, size, 3), dtype=torch.uint8, generator=generator)
    pictures, kept = pictures_of([image])
    found, expected = (
        engine.start(pictures, plans, RenderSpec(), threads=0, kept=kept).finish()
        for engine in (EmulatedViews("compute_80"), NativeViews())
    )
    assert torch.equal(found, expected)
