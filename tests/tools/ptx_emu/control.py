"""Branches, exits, traps and calls."""

from __future__ import annotations

import numpy as np

from .errors import ParseError, Trap
from .syntax import K_BRA, K_BRX, K_EXIT
from .types import u64


class ControlFlow:
    """Branches, exits, traps and calls."""

    # control flow
    def _target(self, ins, lab):
        t = ins.scope.label(lab)
        if t is None:
            raise ParseError(f"label {lab}")
        return t

    def c_bra(self, ins):
        ins.kind = K_BRA
        ins.target = self._target(ins, ins.ops[0][1])

    def c_brx(self, ins):
        ins.kind = K_BRX
        ins.aux = self.src(ins.ops[0], "u32")
        lst = self._target(ins, ins.ops[1][1])[1]
        ins.target = np.array([self._target(ins, label) for label in lst], dtype=np.int64)

    def c_ret(self, ins):
        ins.kind = K_EXIT

    c_exit = c_ret

    def c_trap(self, ins):
        def fn(x, m):
            raise Trap(f"trap executed by {x.who(x.first(m))} at {ins!r}")

        return fn

    def c_call_extern(self, ins):
        name, _, _ = ins.aux
        ins.aux = None
        if name == "vprintf":
            return lambda x, m: None

        def fn(x, m):
            raise Trap(f"call of extern function {name} by {x.who(x.first(m))} at {ins!r}")

        return fn

    def c_nop(self, ins):
        return lambda x, m: None

    c_membar = c_fence = c_prefetch = c_prefetchu = c_discard = c_applypriority = c_nanosleep = (
        c_griddepcontrol
    ) = c_nop

    c_pmevent = c_setmaxnreg = c_brkpt = c_nop

    def c_createpolicy(self, ins):
        put = self.dst(ins.ops[0], "b64")
        return lambda x, m: put(x, m, u64(0))
