"""Moves and address conversions."""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .types import LO_SLOT, PA_SLOT, SH_SLOT, SIZE, SLOT, UDT, WIN, npdt, u64


class Moves:
    """Moves and address conversions."""

    # moves
    def c_mov(self, ins):
        t = ins.parts[-1]
        d, a = ins.ops
        if t == "pred":
            g, put = self.src(a, "pred"), self.dst(d, "pred")
            return lambda x, m: put(x, m, g(x))
        if d[0] == "v" and a[0] != "v":
            n = SIZE[t] // len(d[1])
            if SIZE[t] == 16:
                raise UnknownInstruction("mov.b128")
            puts = [self.dst(e, f"b{8 * n}") for e in d[1]]
            g = self.src(a, f"b{8 * SIZE[t]}")
            dt, ndt = UDT[SIZE[t]], UDT[n]

            def fn(x, m):
                v = g(x)
                vs = [(v >> dt(8 * n * k)).astype(ndt) for k in range(len(puts))]
                for p, e in zip(puts, vs, strict=False):
                    p(x, m, e)

            return fn
        if a[0] == "v" and d[0] != "v":
            n = SIZE[t] // len(a[1])
            gs = [self.src(e, f"b{8 * n}") for e in a[1]]
            put = self.dst(d, f"b{8 * SIZE[t]}")
            dt = UDT[SIZE[t]]

            def fn(x, m):
                v = gs[0](x).astype(dt)
                for k in range(1, len(gs)):
                    v = v | (gs[k](x).astype(dt) << dt(8 * n * k))
                put(x, m, v)

            return fn
        if d[0] == "v":
            n = SIZE[t]
            gs = [self.src(e, t) for e in a[1]]
            ps = [self.dst(e, t) for e in d[1]]

            def fn(x, m):
                vs = [np.array(g(x)) for g in gs]
                for p, v in zip(ps, vs, strict=False):
                    p(x, m, v)

            return fn
        tt = f"b{8 * SIZE[t]}" if a[0] != "i" or t not in ("f32", "f64") else t
        g, put = self.src(a, tt), self.dst(d, tt)
        return lambda x, m: put(x, m, g(x))

    def c_cvta(self, ins):
        t = ins.parts[-1]
        to = "to" in ins.parts
        sp = self.mem_space(ins.parts, ("m", ("i", 0), 0))
        g, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], t)
        w = WIN.get(sp, 0)
        dt = npdt(t)
        w = dt(w & ((1 << 8 * SIZE[t]) - 1))
        if to:
            return lambda x, m: put(x, m, g(x) - w)
        return lambda x, m: put(x, m, g(x) + w)

    def c_isspacep(self, ins):
        sp = self.mem_space(ins.parts, ("m", ("i", 0), 0))
        g, put = self.src(ins.ops[1], "u64"), self.dst(ins.ops[0], "pred")

        def fn(x, m):
            s = g(x) >> u64(SLOT)
            if sp == "global":
                put(x, m, s < u64(SH_SLOT))
            else:
                put(
                    x,
                    m,
                    s
                    == u64(
                        {"shared": SH_SLOT, "local": LO_SLOT, "param": PA_SLOT, "const": 0x3FF}[sp]
                    ),
                )

        return fn

    def c_mapa(self, ins):
        t = ins.parts[-1]
        g, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], t)
        return lambda x, m: put(x, m, g(x))
