"""Integer arithmetic; floating-point forms are passed on."""

from __future__ import annotations

import numpy as np

from .integers import idivrem, mulhi
from .types import FLOATS, SIZE, UDT, i8, i32, i64, npdt, u8


class IntegerArithmetic:
    """Integer arithmetic; floating-point forms are passed on."""

    # integer / float arithmetic dispatch
    def c_add(self, ins):
        return self._arith(ins, "add")

    def c_sub(self, ins):
        return self._arith(ins, "sub")

    def c_mul(self, ins):
        return self._arith(ins, "mul")

    def _arith(self, ins, op):
        P = ins.parts
        t = P[-1]
        d, a, b = ins.ops
        if t in FLOATS:
            return self._farith(ins, op, t)
        if t in ("u16x2", "s16x2"):
            ga, gb, put = self.fsrc(a, t), self.fsrc(b, t), self.fdst(d, t)
            f = {"add": np.add, "sub": np.subtract}[op]
            return lambda x, m: put(x, m, f(ga(x), gb(x)))
        ga, gb = self.src(a, t), self.src(b, t)
        n = SIZE[t]
        if op == "mul":
            if "wide" in P:
                w = t[0] + str(16 * n)
                wd = npdt(w)
                put = self.dst(d, w)
                return lambda x, m: put(x, m, ga(x).astype(wd) * gb(x).astype(wd))
            put = self.dst(d, t)
            if "hi" in P:
                return lambda x, m: put(x, m, mulhi(ga(x), gb(x), t))
            return lambda x, m: put(x, m, ga(x) * gb(x))
        put = self.dst(d, t)
        if "sat" in P:
            lo, hi = (-(2**31), 2**31 - 1)
            sg = 1 if op == "add" else -1
            return lambda x, m: put(
                x, m, np.clip(ga(x).astype(i64) + sg * gb(x).astype(i64), lo, hi).astype(i32)
            )
        if "cc" in P:
            return self._carry(ga, gb, put, op, n, False, True)
        if op == "add":
            return lambda x, m: put(x, m, ga(x) + gb(x))
        return lambda x, m: put(x, m, ga(x) - gb(x))

    def _carry(self, ga, gb, put, op, n, cin, cout):
        dt = UDT[n]

        def fn(x, m):
            a = np.atleast_1d(ga(x)).view(dt)
            b = np.atleast_1d(gb(x)).view(dt)
            c = x.cc.astype(dt) if cin else dt(0)
            if op == "add":
                r = a + b
                k = r < a
                r2 = r + c
                k = k | (r2 < r)
            else:
                r = a - b
                k = a < b
                r2 = r - c
                k = k | (r < c)
            if cout:
                if m is None:
                    x.cc[...] = k
                else:
                    np.copyto(x.cc, k, where=m)
            put(x, m, r2)

        return fn

    def c_addc(self, ins, op="add"):
        t = ins.parts[-1]
        d, a, b = ins.ops
        return self._carry(
            self.src(a, t),
            self.src(b, t),
            self.dst(d, f"u{8 * SIZE[t]}"),
            op,
            SIZE[t],
            True,
            "cc" in ins.parts,
        )

    def c_subc(self, ins):
        return self.c_addc(ins, "sub")

    def c_mad(self, ins):
        P = ins.parts
        t = P[-1]
        if t in FLOATS:
            return self.c_fma(ins)
        d, a, b, c = ins.ops
        ga, gb = self.src(a, t), self.src(b, t)
        n = SIZE[t]
        if "wide" in P:
            w = t[0] + str(16 * n)
            wd = npdt(w)
            gc, put = self.src(c, w), self.dst(d, w)
            return lambda x, m: put(x, m, ga(x).astype(wd) * gb(x).astype(wd) + gc(x))
        gc, put = self.src(c, t), self.dst(d, t)
        if "cc" in P:
            h = "hi" in P
            mul = (lambda x: mulhi(ga(x), gb(x), t)) if h else (lambda x: ga(x) * gb(x))
            return self._carry(mul, gc, self.dst(d, f"u{8 * n}"), "add", n, False, True)
        if "hi" in P:
            if "sat" in P:
                return lambda x, m: put(
                    x,
                    m,
                    np.clip(mulhi(ga(x), gb(x), t).astype(i64) + gc(x), -(2**31), 2**31 - 1).astype(
                        i32
                    ),
                )
            return lambda x, m: put(x, m, mulhi(ga(x), gb(x), t) + gc(x))
        return lambda x, m: put(x, m, ga(x) * gb(x) + gc(x))

    def c_madc(self, ins):
        P = ins.parts
        t = P[-1]
        d, a, b, c = ins.ops
        ga, gb, gc = (self.src(o, t) for o in (a, b, c))
        mul = (lambda x: mulhi(ga(x), gb(x), t)) if "hi" in P else (lambda x: ga(x) * gb(x))
        return self._carry(mul, gc, self.dst(d, f"u{8 * SIZE[t]}"), "add", SIZE[t], True, "cc" in P)

    def c_mul24(self, ins):
        t = ins.parts[-1]
        gs = [self.src(o, t) for o in ins.ops[1:]]
        put = self.dst(ins.ops[0], t)

        def ext(v):
            v = v.astype(i64)
            return ((v << 40) >> 40) if t == "s32" else v & 0xFFFFFF

        hi = "hi" in ins.parts
        dt = npdt(t)

        def fn(x, m):
            p = ext(gs[0](x)) * ext(gs[1](x))
            p = (p >> 16) if hi else p
            p = p.astype(dt)
            put(x, m, p if len(gs) == 2 else p + gs[2](x))

        return fn

    c_mad24 = c_mul24

    def c_sad(self, ins):
        t = ins.parts[-1]
        ga, gb, gc = (self.src(o, t) for o in ins.ops[1:])
        put = self.dst(ins.ops[0], t)
        return lambda x, m: put(x, m, gc(x) + np.where(ga(x) < gb(x), gb(x) - ga(x), ga(x) - gb(x)))

    def c_dp4a(self, ins):
        ta, tb = self._types(ins.parts)
        ga, gb = self.src(ins.ops[1], "b32"), self.src(ins.ops[2], "b32")
        gc, put = self.src(ins.ops[3], "s32"), self.dst(ins.ops[0], "s32")
        da, db = (i8 if ta[0] == "s" else u8), (i8 if tb[0] == "s" else u8)

        def fn(x, m):
            a = np.atleast_1d(ga(x)).view(da).reshape(-1, 4).astype(i32)
            b = np.atleast_1d(gb(x)).view(db).reshape(-1, 4).astype(i32)
            put(x, m, (a * b).sum(1).astype(i32) + gc(x))

        return fn

    def c_div(self, ins):
        P = ins.parts
        t = P[-1]
        if t in FLOATS:
            return self._fdiv(ins, t)
        d, a, b = ins.ops
        ga, gb, put = self.src(a, t), self.src(b, t), self.dst(d, t)
        return lambda x, m: put(x, m, idivrem(ga(x), gb(x), t)[0])

    def c_rem(self, ins):
        t = ins.parts[-1]
        d, a, b = ins.ops
        ga, gb, put = self.src(a, t), self.src(b, t), self.dst(d, t)
        return lambda x, m: put(x, m, idivrem(ga(x), gb(x), t)[1])

    def c_abs(self, ins):
        t = ins.parts[-1]
        d, a = ins.ops
        if t in FLOATS:
            return self._signop(ins, t, "abs")
        ga, put = self.src(a, t), self.dst(d, t)
        return lambda x, m: put(x, m, np.abs(ga(x)))

    def c_neg(self, ins):
        t = ins.parts[-1]
        d, a = ins.ops
        if t in FLOATS:
            return self._signop(ins, t, "neg")
        ga, put = self.src(a, t), self.dst(d, t)
        return lambda x, m: put(x, m, -ga(x))
