"""What compiled CUDA code needs of a GPU, against what docs/design/cuda-resources.md states."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from fastaug.toolchain import nvrtc

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "design" / "cuda-resources.md"
# Bytes of shared memory per block, from a small limit to that of the H100.
LIMITS = (8192, 49152, 65536, 101376, 166912, 232448)


def load_benchmark() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(
        "cuda_resources", ROOT / "benchmarks" / "cuda_resources.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()


def kernels_for(program: nvrtc.Program, architecture: str) -> list[str]:
    """Kernels that tests compile for an architecture: each in one dtype, which all take turns with.
    All of them for all architectures would take minutes."""
    turn = benchmark.ARCHITECTURES.index(architecture)
    forms: dict[str, list[str]] = {}
    for name in program.kernels:
        forms.setdefault(re.sub("_(f32|f16|bf16)", "", name), []).append(name)
    return [names[(turn + place) % len(names)] for place, names in enumerate(forms.values())]


def check_resources(source: nvrtc.Program, architecture: str, registers: dict[str, int]) -> None:
    """Kernels compile without spills, and to what the document states. registers: by the last word
    of a kernel's name, what the launch plan counts on."""
    column = benchmark.ARCHITECTURES.index(architecture)
    rows = dict(re.findall(r"\n\| (\w+) \| (.+) \|", registers_table()))
    for name in kernels_for(source, architecture):
        used = benchmark.resources_of(benchmark.compiled(source, architecture, name).log)
        assert used.stack == used.spilled == used.static_shared == 0, name
        assert 0 < used.registers <= registers.get(name.rpartition("_")[2], 64), name
        if f"NVRTC {nvrtc.nvrtc_version()}." in DOCUMENT.read_text():
            assert rows[name].split(" | ")[column] == str(used), name


def registers_table() -> str:
    """The section of the document with the table of registers."""
    return section("Registers per thread")


def section(title: str) -> str:
    """The table in a section of the document."""
    found = re.search(rf"## {title}\n.*?(\n\|.+?)\n\n", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    return found[1]
