"""Registers, instructions, shared memory and occupancy of the CUDA kernels.

    python benchmarks/cuda_resources.py                    # prints them; compiles for minutes
    python benchmarks/cuda_resources.py --out docs/design/cuda-resources.md

No GPU is needed, and none is measured.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from parts import sass

from fastaug.kernels.cuda import OBJECTIVE, RESERVED, WARP, launch_plan
from fastaug.toolchain.build import built, digest
from fastaug.toolchain.nvrtc import Compiled, Program, compile_kernels, nvrtc_version
from fastaug.views.cuda import VIEWS
from fastaug.views.launch import MemoryNeeds, memory_needs, plan_launch
from fastaug.views.packed_plan import LAYER, VIEW, kernel_codes
from fastaug.views.render_spec import RenderSpec

COUNTED = "sm_89"
"""The architecture whose instructions are listed: that of the L4."""
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SHARED_LIMITS = {
    "sm_75": 65536,
    "sm_86, 89, 120": 101376,
    "sm_80": 166912,
    "sm_90, 100": 232448,
}
"""Bytes of shared memory that a block may ask for, by the CUDA programming guide."""
SHAPES = [(1, 1000), (2, 1000), (4, 1000), (8, 1000), (16, 1000), (16, 100), (16, 21841)]
WARPS_BY_REGISTERS = 65536 // (64 * WARP)
"""Of an SM, at the 64 registers a thread that __launch_bounds__ allows."""

VIEW_CASES = {
    "224 px, crop and flip": (224, (375, 500), RenderSpec(), 0),
    "224 px, antialiased": (224, (375, 500), RenderSpec(antialias=True), 0),
    "224 px, RandAugment": (224, (375, 500), RenderSpec(), 2),
    "32 px, shifted by 4": (32, (32, 32), RenderSpec(), 0),
    "32 px, RandAugment": (32, (32, 32), RenderSpec(), 2),
}
"""Size, height and width of the box, form, operations. Boxes of 32 px reach beyond the image."""
PARTS = ("tables", "view", "another view", "box")

TEXT = """# CUDA resources

    python benchmarks/cuda_resources.py --out docs/design/cuda-resources.md

Registers, instructions, shared memory and occupancy of the CUDA kernels, made with NVRTC {version}.
These numbers come from the compiler and from the launch plans; no GPU has measured them.

## Registers per thread

By kernel and architecture. Static shared memory, a stack frame or spilled registers would be listed
next to the number.

{kernels}

## Instructions

The machine code for {counted}, as `nvdisasm` prints it: all instructions; loads, stores and atomics
of shared memory, of global memory, and of memory whose kind is known only when the kernel runs
(generic), by their width in bits; instructions in fp64; and loads and stores of local memory, where
spilled registers would be. A kernel of views comes in three forms: with all of its memory in shared
memory, with only the tables there, and with none. `tests/gpu_code/test_sass.py` checks all seven
architectures; [The view kernel](view-kernel.md#on-a-gpu) gives the reasons.

{instructions}

## Launch plans of the loss kernel

`launch_plan` in `fastaug/kernels/cuda.py`: threads per block, classes held in shared memory at a
time, dynamic shared memory per block, and resident warps per SM.

{plans}

## Launch plans of the view kernel

`plan_launch` in `fastaug/views/launch.py`, for a photograph of 500 x 375 pixels or an image of 32:
threads per block, rows of the view made at a time, what is in shared memory, what is in global
memory (for each resident block), and resident blocks and warps per SM.

{views}
"""


class Resources(NamedTuple):
    """Of one kernel: registers of a thread, and bytes."""

    registers: int
    static_shared: int
    stack: int
    spilled: int

    def __str__(self) -> str:
        named = {"shared": self.static_shared, "stack": self.stack, "spilled": self.spilled}
        return ", ".join([f"{self.registers}", *(f"{v} B {k}" for k, v in named.items() if v)])


def compiled(program: Program, architecture: str, kernel: str) -> Compiled:
    """One kernel and what ptxas reports about it, from the cache of compiled files."""
    content = digest(program.sources(), *program.options)
    name = f"{kernel}-{architecture}-nvrtc{nvrtc_version()}-{content}-reported"

    def compile_it(file: Path) -> None:
        options = ["--ptxas-options=-v"]
        image, log = compile_kernels(program, architecture, only=kernel, options=options)
        file.write_bytes(log.encode() + b"\0" + image)

    log, _, image = built(name, compile_it).read_bytes().partition(b"\0")
    return Compiled(image, log.decode())


def resources_of(log: str) -> Resources:
    """As ptxas reports them."""
    patterns = (
        r"Used (\d+) registers",
        r"(\d+) bytes smem",
        r"(\d+) bytes stack",
        r"(\d+) bytes spill",
    )
    return Resources(*(sum(map(int, re.findall(pattern, log))) for pattern in patterns))


def table(*rows: tuple[object, ...]) -> str:
    head, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def kernel_table(resources: dict[str, dict[str, Resources]]) -> str:
    names = (*OBJECTIVE.kernels, *VIEWS.kernels)
    return table(
        ("kernel", *resources),
        *((name, *(kernels[name] for kernels in resources.values())) for name in names),
    )


def instruction_row(code: sass.Code) -> tuple[str, ...]:
    """Cells of the table of instructions."""

    def widths(*operations: str) -> str:
        found = code.widths(*operations)
        return ", ".join(f"{number} x {bits}" for bits, number in found.items()) or "-"

    return (
        str(len(code.instructions)),
        *(widths(operation) for operation in ("LDS", "STS")),
        str(code.count("ATOMS") or "-"),
        *(widths(operation) for operation in ("LDG", "STG", "LD", "ST")),
        str(code.count("ATOM", "ATOMG", "RED", "REDG") or "-"),
        str(code.fp64 or "-"),
        str(code.count("LDL", "STL") or "-"),
    )


def instruction_table() -> str:
    head = ("kernel", "all", "shared loads", "shared stores", "shared atomics")
    head += ("global loads", "global stores", "generic loads", "generic stores")
    head += ("other atomics", "fp64", "local")
    rows = (
        (name, *instruction_row(sass.disassemble(compiled(program, COUNTED, name).image)))
        for program in (OBJECTIVE, VIEWS)
        for name in program.kernels
    )
    return table(head, *rows)


def plan_table() -> str:
    rows = []
    for views, classes in SHAPES:
        for gpu, limit in SHARED_LIMITS.items():
            plan = launch_plan(views, classes, limit)
            assert plan is not None
            warps = plan.threads // WARP
            blocks = min(
                (limit + RESERVED) // (plan.shared_bytes + RESERVED), WARPS_BY_REGISTERS // warps
            )
            held = "all" if plan.width == classes else plan.width
            kilobytes = f"{plan.shared_bytes / 1024:.1f} KB"
            rows.append((views, classes, gpu, plan.threads, held, kilobytes, blocks * warps))
    head = ("views", "classes", "GPU", "threads", "classes at a time", "shared", "warps on an SM")
    return table(head, *rows)


def view_needs(case: str) -> MemoryNeeds:
    size, (height, width), form, count = VIEW_CASES[case]
    views, layers = np.zeros(1, VIEW), np.zeros(count, LAYER)
    views["height"], views["width"] = (32, 32) if size == 32 else (height, width)
    views["box_height"], views["box_width"] = height, width
    views["top"] = views["left"] = -4 if size == 32 else 0
    layers["operation"] = kernel_codes().need_second_buffer[0]
    return memory_needs(views, layers, form, size)


def view_table() -> str:
    rows = []
    for case, (size, *_) in VIEW_CASES.items():
        needs = view_needs(case)
        for gpu, limit in SHARED_LIMITS.items():
            plan = plan_launch(needs, 1024, size, limit, processors=100)
            strip = plan.places.strip_rows
            lengths = (needs.tables(strip), needs.first, needs.second, needs.box)
            shared, other = (
                " + ".join(
                    f"{part} {length / 1024:.1f} KB"
                    for place, (part, length) in enumerate(zip(PARTS, lengths, strict=True))
                    if length and bool(plan.places.in_shared >> place & 1) == is_shared
                )
                for is_shared in (True, False)
            )
            warps = plan.on_sm * plan.threads // WARP
            rows.append((case, gpu, plan.threads, strip, shared, other or "-", plan.on_sm, warps))
    head = ("view", "GPU", "threads", "rows", "shared", "global", "blocks", "warps on an SM")
    return table(head, *rows)


def document(kernels: str, instructions: str, version: str) -> str:
    return TEXT.format(
        kernels=kernels,
        instructions=instructions,
        counted=COUNTED,
        plans=plan_table(),
        views=view_table(),
        version=version,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write this file instead of printing")
    out = parser.parse_args().out
    resources = {
        architecture: {
            kernel: resources_of(compiled(program, architecture, kernel).log)
            for program in (OBJECTIVE, VIEWS)
            for kernel in program.kernels
        }
        for architecture in ARCHITECTURES
    }
    text = document(kernel_table(resources), instruction_table(), nvrtc_version())
    if out:
        out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
