"""Comparisons and selections."""

from __future__ import annotations

import numpy as np

from .floats import ftz
from .types import FLOATS, SIZE, X2, f16, f32, i16, i32, u16, u32


class Comparisons:
    """Comparisons and selections."""

    # comparison and selection
    def _cmp(self, op, t):
        isf = t in FLOATS
        base = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(op, op)
        F = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }
        if not isf:
            return F[base]
        if op == "num":
            return lambda a, b: ~(np.isnan(a) | np.isnan(b))
        if op == "nan":
            return lambda a, b: np.isnan(a) | np.isnan(b)
        if op.endswith("u"):
            f = F[op[:-1]]
            return lambda a, b: f(a, b) | np.isnan(a) | np.isnan(b)
        f = F[base]
        if op == "ne":
            return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
        return f

    def _cmp_setup(self, ins, t):
        P = ins.parts
        _d, a, b = ins.ops[:3]
        cop = P[1]
        bop = P[2] if len(P) > 2 and P[2] in ("and", "or", "xor") else None
        if t in FLOATS:
            ga, gb = self.fsrc(a, t), self.fsrc(b, t)
        else:
            tt = t
            if cop in ("lo", "ls", "hi", "hs") and t[0] == "s":
                tt = "u" + t[1:]
            ga, gb = self.src(a, tt), self.src(b, tt)
        c = self._cmp(cop, t)
        z = "ftz" in P
        bt = X2.get(t, t)
        gc = self.src(ins.ops[3], "pred") if len(ins.ops) > 3 else None
        bf = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[bop]

        def val(x):
            u, v = ga(x), gb(x)
            if z:
                u, v = ftz(u, bt), ftz(v, bt)
            return c(u, v)

        return val, gc, bf

    def c_setp(self, ins):
        t = ins.parts[-1]
        val, gc, bf = self._cmp_setup(ins, t)
        d = ins.ops[0]
        if d[0] == "pair":
            p, q = self.dst(d[1], "pred"), self.dst(d[2], "pred")
        else:
            p, q = self.dst(d, "pred"), None
        if t in ("f16x2", "bf16x2"):

            def fn(x, m):
                r = val(x)
                c = gc(x) if gc else None
                a, b = r[:, 0], r[:, 1]
                if bf:
                    a, b = bf(a, c), bf(b, c)
                p(x, m, a)
                q(x, m, b)

            return fn
        if q is None and bf is None:
            return lambda x, m: p(x, m, val(x))

        def fn(x, m):
            r = val(x)
            if bf:
                c = np.array(gc(x))
                p(x, m, bf(r, c))
                if q:
                    q(x, m, bf(~r, c))
            else:
                p(x, m, r)
                q(x, m, ~r)

        return fn

    def c_set(self, ins):
        dt, t = self._types(ins.parts)[-2:]
        val, gc, bf = self._cmp_setup(ins, t)
        if t in X2:
            one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(dt, 0xFFFF)
            put = self.dst(ins.ops[0], "b32")

            def fn(x, m):
                r = val(x)
                if bf:
                    r = bf(r, np.atleast_1d(gc(x))[:, None])
                put(x, m, np.where(r, u16(one), u16(0)).view(u32).reshape(-1))

            return fn
        put = self.dst(ins.ops[0], dt)
        one = {
            "f32": f32(1),
            "f16": f16(1),
            "bf16": u16(0x3F80),
            "u32": u32(0xFFFFFFFF),
            "s32": i32(-1),
            "u16": u16(0xFFFF),
            "s16": i16(-1),
        }[dt]

        def fn(x, m):
            r = val(x)
            if bf:
                r = bf(r, gc(x))
            put(x, m, np.where(r, one, type(one)(0)))

        return fn

    def c_selp(self, ins):
        t = f"b{8 * SIZE[ins.parts[-1]]}"
        d, a, b, c = ins.ops
        if ins.parts[-1] in ("f32", "f64"):
            t = ins.parts[-1]
        ga, gb, gc, put = self.src(a, t), self.src(b, t), self.src(c, "pred"), self.dst(d, t)
        return lambda x, m: put(x, m, np.where(gc(x), ga(x), gb(x)))

    def c_slct(self, ins):
        dt, ct = self._types(ins.parts)[-2:]
        d, a, b, c = ins.ops
        ga, gb, gc, put = self.src(a, dt), self.src(b, dt), self.src(c, ct), self.dst(d, dt)
        return lambda x, m: put(x, m, np.where(gc(x) >= 0, ga(x), gb(x)))
