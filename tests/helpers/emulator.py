"""Runs compiled GPU code (PTX) on the CPU, where an emulator is there.

FASTAUG_PTX_EMULATOR names a Python file that offers Module(ptx).launch(name, grid, block, args,
shared_bytes); .ci/run sets it. It has never been compared with a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from types import ModuleType

import pytest

needs_emulator = pytest.mark.skipif(
    not os.environ.get("FASTAUG_PTX_EMULATOR"),
    reason="FASTAUG_PTX_EMULATOR names no PTX emulator: compiled GPU code is not run",
)


@cache
def emulator() -> ModuleType:
    file = os.environ["FASTAUG_PTX_EMULATOR"]
    spec = importlib.util.spec_from_file_location("fastaug_ptx_emulator", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
