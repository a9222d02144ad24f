"""The fuzzer of the view kernel: fuzz_plan.cpp, built by clang with libFuzzer and sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from target import SOURCES

import fastaug
from fastaug.toolchain.build import source_folder
from fastaug.views.packed_plan import (
    LONGEST_SIDE,
    MAX_NUMBER,
    encode_layers,
    encode_views,
    form_structure,
    pictures_of,
)
from fastaug.views.render_spec import BORDERS, RenderSpec

SANITIZERS = "fuzzer,address,undefined,float-cast-overflow"
FLAGS = ("-std=c++17", "-gline-tables-only", "-w", "-pthread", "-march=native")
FLAGS += ("-ffp-contract=off", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all")


def compiler() -> str | None:
    """clang++, if it has libFuzzer and its sanitizers."""
    found = shutil.which("clang++")
    if found is None:
        return None
    ask = [found, "-x", "c++", "-", f"-fsanitize={SANITIZERS}", "-o", "/dev/null"]
    empty = 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }'
    done = subprocess.run(ask, input=empty, capture_output=True, text=True)
    return None if done.returncode else found


def build(clang: str, folder: Path, optimize: str, sources: Path | None = None) -> Path:
    """Compile the fuzzer; sources: default: those of the product.

    optimize: -O0 compiles in 5 seconds, -O1 in half a minute and reads four times the inputs.
    """
    program = folder / "fuzz_plan"
    bounds = [f"-DLONGEST_SIDE={LONGEST_SIDE}", f"-DMAX_NUMBER={float(MAX_NUMBER)!r}"]
    include = [f"-I{sources or source_folder()}", f"-I{SOURCES.parent / 'helpers'}"]
    command = [clang, *FLAGS, optimize, *bounds, *include, str(SOURCES / "fuzz_plan.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, text=True)
    return program


def seeds() -> list[bytes]:
    """Plans of all operations and borders, as Python packs them."""
    images = [torch.zeros(9, 14, 3, dtype=torch.uint8)]
    pictures, _ = pictures_of(images)
    found = []
    for number, border in enumerate(BORDERS * 4):
        plan = fastaug.plan_views(
            images, views=3, size=8 + number, augment="randaugment", seed=number
        )
        if number % 2:  # beyond the image
            plan = replace(plan, boxes=plan.boxes + np.array([-3, -2, 5, 5]))
        spec = RenderSpec(
            ("bicubic", "bilinear")[number // 4 % 2], number > 7, border, "imagenet", torch.float32
        )
        views, layers = encode_views(pictures, plan), encode_layers(plan)
        per_view = plan.operations.shape[2]
        content = bytes(form_structure(spec, plan.size, per_view))
        content += bytes([number % 3, 2, 8, 13, number])  # dtype, views, height, width, row bytes
        for place, view in enumerate(views):
            content += view.tobytes() + layers[place * per_view : (place + 1) * per_view].tobytes()
        found.append(content)
    return found
