"""The view kernels for a GPU, as far as they go without one: compilation, arguments, plans."""

from __future__ import annotations

import re
import subprocess
from ctypes import c_longlong, c_void_p, sizeof
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compiled_resources import LIMITS, benchmark, check_resources

from fastaug.runtime.device import cpp_compiler
from fastaug.runtime.streams import SideStream
from fastaug.toolchain import nvrtc
from fastaug.toolchain.build import source_folder
from fastaug.views import engine
from fastaug.views.cuda import VIEWS, CudaViews
from fastaug.views.launch import (
    MOST_SCRATCH,
    REGISTERS,
    RESERVED,
    MemoryNeeds,
    Places,
    memory_needs,
    plan_launch,
)
from fastaug.views.packed_plan import LAYER, VIEW, Form, form_structure
from fastaug.views.render_spec import BORDERS, RenderSpec

# --- compilation ---


@pytest.mark.parametrize("architecture", benchmark.ARCHITECTURES)
def test_every_kernel_compiles_without_spills_and_as_documented(architecture: str) -> None:
    check_resources(VIEWS, architecture, REGISTERS)


def test_arguments_have_the_types_that_kernels_take() -> None:
    ptx = nvrtc.compile_kernels(VIEWS, "compute_75", only="views_f16_all").image.decode("ascii")
    found = re.findall(r"\.param ([^,()]*)\bviews_f16_all_param_\d+(\[\d+\])?[,\s]", ptx)
    words = [length or kind.split()[0] for kind, length in found]
    structures = iter((Form, Places))
    named = {c_void_p: ".u64", c_longlong: ".u64"}
    assert words == [named.get(t) or f"[{sizeof(next(structures))}]" for t in VIEWS.arguments]


def test_structures_lie_as_in_the_kernels() -> None:
    """The order of their fields, by the names in the sources."""
    sources = (source_folder() / "views.h").read_text() + (source_folder() / "views.cu").read_text()
    for structure, inner in ((Form, "Filter"), (Places, "")):
        body = re.search(rf"struct {structure.__name__} {{(.+?)\n}};", sources, re.DOTALL)
        assert body is not None
        lines = re.sub(r"//.*", "", body[1])
        if inner:
            lines = lines.replace("Filter filter;", "int cubic, antialias;")
        names = re.findall(r"(\w+)(?:\[3\])?[,;]", lines)
        assert names == [field[0] for field in structure._fields_]
    form = form_structure(RenderSpec(border="edge", antialias=True, normalize="cifar"), 32, 2)
    assert (form.size, form.layers, form.border) == (32, 2, BORDERS.index("edge"))
    assert (form.cubic, form.antialias) == (1, 1)
    assert form.mean[2] == pytest.approx(0.4465 * 255, rel=1e-3)


# --- what views need, against the structs of the kernel ---


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = cpp_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    program = tmp_path_factory.mktemp("layout") / "layout"
    source = Path(__file__).parents[1] / "helpers/view_layout.cpp"
    flags = ["-std=c++17", "-O1", "-w", f"-I{source_folder()}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    return program


def test_needs_are_those_of_the_kernel(layout: Path) -> None:
    random = np.random.default_rng(0)
    rows, ours = [], []
    for number in range(600):
        size, height, width = (int(side) for side in random.integers(1, (300, 900, 900)))
        box = [int(side) for side in random.integers(1, 900, 2)]
        if number % 5 == 0:
            box[number % 2] = size
        if number % 7 == 0:  # a box of the view's size, of an image that may be smaller
            box, width = [size, size], size + int(random.integers(1 - size, 3))
        top, left = (int(random.integers(-30, 60)) * (number % 3) for _ in range(2))
        interpolation, border = ("bilinear", "bicubic")[number % 2], BORDERS[number // 2 % 4]
        form = RenderSpec(interpolation, number % 4 > 1, border)
        layers, strip = number % 3, int(random.integers(1, 20))
        operation = int(random.integers(0, 13))
        place = (height, width, top, left, *box)
        how = (BORDERS.index(border), interpolation == "bicubic", form.antialias)
        rows.append((size, min(layers, 1), *how, operation, strip, *place))
        view, layer = np.zeros(1, VIEW), np.zeros(min(layers, 1), LAYER)
        for name, value in zip(VIEW.names[2:8], place, strict=True):
            view[name] = value
        layer["operation"] = operation
        needs = memory_needs(view, layer, form, size)
        ours.append((needs.tables(strip), needs.first, needs.second, needs.box))
    text = "\n".join(" ".join(str(int(number)) for number in row) for row in rows)
    done = subprocess.run([layout], input=text, capture_output=True, text=True, check=True)
    theirs = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert theirs == ours
    assert any(first for _, first, _, _ in ours)
    assert any(second for _, _, second, _ in ours)
    assert any(box for *_, box in ours)


def test_the_needs_of_a_batch_are_those_of_its_largest_views() -> None:
    views, layers = np.zeros(3, VIEW), np.zeros(6, LAYER)
    views["height"] = views["width"] = 50
    views["box_height"], views["box_width"] = (10, 50, 20), (50, 10, 20)
    views["top"] = (0, 0, 31)
    layers["operation"][4] = 4
    form = RenderSpec(antialias=True)
    alone = [memory_needs(views[i : i + 1], layers[2 * i : 2 * i + 2], form, 8) for i in range(3)]
    batch = memory_needs(views, layers, form, 8)
    for rows in (1, 8):
        assert batch.tables(rows) == max(one.tables(rows) for one in alone)
    assert [one.second for one in alone] == [0, 0, 193]
    assert (batch.first, batch.second, batch.box) == (193, 193, 3 * 20 * 20)


# --- plans ---


def needs(tables: int, row: int, view: int = 0, other: int = 0, box: int = 0) -> MemoryNeeds:
    return MemoryNeeds(np.array([tables]), np.array([row]), view, other, box)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_plan_fits_and_no_two_parts_overlap(limit: int) -> None:
    random = np.random.default_rng(limit)
    for _ in range(300):
        size = int(random.integers(4, 400))
        wide = int(random.integers(1, 4000))
        view = 3 * size * size * int(random.integers(0, 2))
        other, box = view * int(random.integers(0, 2)), int(random.integers(0, 2)) * 3 * wide**2
        given = needs(int(random.integers(size, 40 * size)), 3 * wide, view, other, box)
        count, processors = int(random.integers(1, 3000)), int(random.integers(1, 150))
        plan = plan_launch(given, count, size, limit, processors)
        places = plan.places
        assert plan.threads % 32 == 0
        assert 32 <= plan.threads <= 384
        assert 1 <= places.strip_rows <= min(8, size)
        lengths = (given.tables(places.strip_rows), view, other, box)
        starts = (places.tables, places.first, places.second, places.box)
        ends = {True: 0, False: 0}
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            is_shared = bool(places.in_shared >> number & 1)
            assert start >= ends[is_shared]
            assert start % 16 == 0
            ends[is_shared] = start + length
        assert ends[True] <= plan.shared_bytes <= limit
        assert ends[False] <= places.piece
        assert 1 <= plan.blocks <= count
        if places.piece == 0:
            assert plan.blocks == count
        else:
            assert plan.blocks <= plan.on_sm * processors
            assert plan.scratch_bytes <= max(MOST_SCRATCH, places.piece)
        assert plan.on_sm * (plan.shared_bytes + RESERVED) <= limit + RESERVED
        assert plan.on_sm * plan.threads * REGISTERS[plan.shared] <= 65536


def test_what_lies_where() -> None:
    """224 px of 500 x 375: the tables are 23 KB and 6 KB a row, a view is 147 KB."""
    view = 3 * 224 * 224  # a multiple of 16
    crop, augmented = needs(5824, 1500), needs(5824, 1500, view, view)
    tables, h100 = 0b001, plan_launch(augmented, 2048, 224, 232448, 132)
    assert (h100.places.in_shared, h100.places.strip_rows) == (0b011, 8)
    assert h100.blocks == 132
    assert h100.places.piece == view
    for limit, rows in ((65536, 1), (101376, 4), (166912, 8)):
        plan = plan_launch(augmented, 2048, 224, limit, 100)
        assert (plan.places.in_shared, plan.places.strip_rows) == (tables, rows)
        assert plan.blocks == 200
        assert plan_launch(crop, 2048, 224, limit, 100).blocks == 2048
    # A row that is wider than shared memory: nothing fits.
    plan = plan_launch(needs(5824, 20_000), 2048, 224, 65536, 40)
    assert (plan.places.in_shared, plan.shared) == (0, "none")
    # A box of 300 MB: three blocks have theirs in a gigabyte; of 3 GB, one.
    assert plan_launch(needs(100, 100, box=300 * 2**20), 64, 8, 65536, 40).blocks == 3
    assert plan_launch(needs(100, 100, box=3 * 2**30), 64, 8, 65536, 40).blocks == 1


# --- the engine ---


def test_a_gpu_has_its_engine_and_says_why_not() -> None:
    found = engine.engine_of.__wrapped__(torch.device("cuda", 0))
    assert isinstance(found, CudaViews)
    if not torch.cuda.is_available():
        assert found.why_not() == "needs an NVIDIA GPU"


def test_its_sources_are_files() -> None:
    names = {file.name for file in CudaViews(torch.device("cuda", 0)).sources() if file.is_file()}
    headers = {"views.h", "operations.h", "resample.h", "pixels.h", "block.h", "values.h"}
    python = {"cuda.py", "launch.py", "packed_plan.py", "randaugment.py", "nvrtc.py"}
    assert headers | python | {"views.cu"} < names


def test_what_a_stream_reads_is_kept_until_it_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = [False, True, False]
    events = iter([SimpleNamespace(query=lambda i=i: done[i]) for i in range(3)])
    stream = SimpleNamespace(record_event=lambda: next(events))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    side = SideStream(torch.device("cuda", 0))
    for number in range(3):
        side.keep(number)

    def kept() -> list[Any]:
        side.release()
        return [what for _, what in side._in_use]

    assert kept() == [0, 1, 2]  # the stream works in order: the second one is done after the first
    done[0] = True
    assert kept() == [2]
