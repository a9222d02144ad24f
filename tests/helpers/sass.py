"""Machine code of the kernels that tests compile, disassembled once."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from compiled_resources import benchmark

from fastaug.kernels.cuda import OBJECTIVE
from fastaug.views.cuda import VIEWS

sass = benchmark.sass


@cache
def code_of(kernel: str, architecture: str) -> Any:
    """benchmarks/parts/sass.py says what a Code offers."""
    if sass.disassembler() is None:
        pytest.skip(f"nvdisasm is not installed: pip install {sass.PACKAGE}")
    program = VIEWS if kernel in VIEWS.kernels else OBJECTIVE
    return sass.disassemble(benchmark.compiled(program, architecture, kernel).image)


def moved(loop: tuple[Any, ...]) -> Counter[tuple[str, int]]:
    """Loads and stores in a loop, by what they do and their width. Without those of matrices."""
    return Counter(
        (one.operation[:2], one.bits)
        for one in loop
        if one.operation in ("LD", "LDS", "LDG", "ST", "STS", "STG") and one.bits != 64
    )
