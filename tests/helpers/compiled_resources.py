"""What compiled CUDA code needs of a GPU, against what docs/cuda-resources.md states."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from fastaug.toolchain import nvrtc

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "cuda-resources.md"
# Bytes of shared memory per block, from a small limit to that of the H100.
LIMITS = (8192, 49152, 65536, 101376, 166912, 232448)


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "cuda_resources", ROOT / "benchmarks" / "cuda_resources.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()


def check_resources(source: nvrtc.Program, architecture: str, registers: int) -> None:
    """Every kernel of a source compiles without spills, and to what the document states."""
    resources = benchmark.compiled_resources(source, architecture)
    assert set(resources) == set(source.kernels)
    for name, used in resources.items():
        assert used.stack == used.spilled == used.static_shared == 0, name
        assert 0 < used.registers <= registers, name  # what the launch plan counts on
    if f"NVRTC {nvrtc.nvrtc_version()}." in DOCUMENT.read_text():
        column = benchmark.ARCHITECTURES.index(architecture)
        rows = re.findall(r"\| (\w+) \| (.+) \|", DOCUMENT.read_text())
        documented = {name: row.split(" | ")[column] for name, row in rows if name in resources}
        assert documented == {name: str(used) for name, used in resources.items()}
