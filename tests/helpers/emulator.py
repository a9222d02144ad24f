"""The PTX emulator: runs compiled GPU code on the CPU.

FASTAUG_PTX_EMULATOR may name another one, a Python file or a package folder that offers
Module(ptx).launch(name, grid, block, args, shared_bytes). The project's own is tests/tools/ptx_emu;
it has never been compared with a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

OWN = Path(__file__).parents[1] / "tools/ptx_emu"


@cache
def emulator() -> ModuleType:
    found = Path(os.environ.get("FASTAUG_PTX_EMULATOR") or OWN)
    file = found / "__init__.py" if found.is_dir() else found
    spec = importlib.util.spec_from_file_location("fastaug_ptx_emulator", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
