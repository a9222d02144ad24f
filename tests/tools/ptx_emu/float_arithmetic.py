"""Floating-point arithmetic and functions."""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .floats import add_odd, dir_adjust, fma64, ftz, narrow, two_prod, two_sum
from .types import FLOATS, SIZE, TINY, UDT, X2, f32, f64, u32


class FloatArithmetic:
    """Floating-point arithmetic and functions."""

    def _signop(self, ins, t, op):
        n = SIZE[t]
        b = f"b{8 * n}"
        ga, put = self.src(ins.ops[1], b), self.dst(ins.ops[0], b)
        k = {
            "f32": 0x80000000,
            "f64": 1 << 63,
            "f16": 0x8000,
            "bf16": 0x8000,
            "f16x2": 0x80008000,
            "bf16x2": 0x80008000,
            "f32x2": 0x8000000080000000,
        }[t]
        k = UDT[n](k)
        z = "ftz" in ins.parts and t == "f32"

        def fn(x, m):
            v = ga(x)
            if z:
                v = ftz(np.atleast_1d(v).view(f32)).view(u32)
            put(x, m, (v ^ k) if op == "neg" else (v & ~k))

        return fn

    def c_copysign(self, ins):
        t = ins.parts[-1]
        ga, gb, put = self.src(ins.ops[1], t), self.src(ins.ops[2], t), self.dst(ins.ops[0], t)
        return lambda x, m: put(x, m, np.copysign(gb(x), ga(x)))

    def c_testp(self, ins):
        k, t = ins.parts[1], ins.parts[-1]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], "pred")
        f = {
            "finite": np.isfinite,
            "infinite": np.isinf,
            "number": lambda v: ~np.isnan(v),
            "notanumber": np.isnan,
            "normal": lambda v: np.isfinite(v) & (np.abs(v) >= TINY[t]),
            "subnormal": lambda v: (np.abs(v) < TINY[t]) & (v != 0),
        }[k]
        return lambda x, m: put(x, m, f(ga(x)))

    def c_min(self, ins, op="min"):
        P = ins.parts
        t = P[-1]
        if t in FLOATS:
            gs = [self.fsrc(o, t) for o in ins.ops[1:]]
            put = self.fdst(ins.ops[0], t)
            nan, z = "NaN" in P, "ftz" in P
            xs = "xorsign" in P
            bt = X2.get(t, t)

            def two(a, b):
                if z:
                    a, b = ftz(a, bt), ftz(b, bt)
                if xs:
                    sg = np.signbit(a) ^ np.signbit(b)
                    a, b = np.abs(a), np.abs(b)
                if nan:
                    r = np.minimum(a, b) if op == "min" else np.maximum(a, b)
                else:
                    r = np.fmin(a, b) if op == "min" else np.fmax(a, b)
                zz = (a == 0) & (b == 0)
                if np.any(zz):
                    sa, sb = np.signbit(a), np.signbit(b)
                    r = np.where(
                        zz,
                        np.where(
                            (sa | sb) if op == "min" else (sa & sb),
                            r.dtype.type(-0.0),
                            r.dtype.type(0),
                        ),
                        r,
                    )
                if xs:
                    r = np.where(sg, -r, r)
                return r

            def fn(x, m):
                r = two(gs[0](x), gs[1](x))
                for g in gs[2:]:
                    r = two(r, g(x))
                if "relu" in P:
                    r = np.where(r < 0, r.dtype.type(0), r)
                put(x, m, r)

            return fn
        if t in X2:
            gs = [self.fsrc(o, t) for o in ins.ops[1:]]
            put = self.fdst(ins.ops[0], t)
        else:
            gs = [self.src(o, t) for o in ins.ops[1:]]
            put = self.dst(ins.ops[0], t)
        f = np.minimum if op == "min" else np.maximum
        relu = "relu" in P

        def fn(x, m):
            r = f(gs[0](x), gs[1](x))
            for g in gs[2:]:
                r = f(r, g(x))
            put(x, m, np.maximum(r, 0) if relu else r)

        return fn

    def c_max(self, ins):
        return self.c_min(ins, "max")

    # float
    def _fpost(self, P, t):
        sat, relu, z = "sat" in P, "relu" in P, "ftz" in P
        bt = X2.get(t, t)
        if not (sat or relu or z):
            return None

        def post(r):
            if z:
                r = ftz(r, bt)
            if sat:
                r = np.where(np.isnan(r), r.dtype.type(0), np.clip(r, 0, 1))
            if relu:
                r = np.where(r < 0, r.dtype.type(0), r)
            return r

        return post

    def _farith(self, ins, op, t):
        P = ins.parts
        d, a, b = ins.ops
        ta = t
        if len(self._types(P)) == 2:  # add.f32.bf16 d, a, c: a is converted, c and d are f32
            t, ta = self._types(P)
            if t != "f32" or ta not in ("f16", "bf16") or op == "mul":
                raise UnknownInstruction(ins.op)
        ga, gb = self.fsrc(a, ta), self.fsrc(b, t)
        mode = self._mode(P) or "rn"
        bt = X2.get(t, t)
        put = self.fdst(d, t)
        z = "ftz" in P
        post = self._fpost(P, t)
        uf = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
        if mode == "rn":
            if not z and post is None:
                return lambda x, m: put(x, m, uf(ga(x), gb(x)))
            calc = uf
        elif bt == "f32":

            def calc(u, v):
                u, v = u.astype(f64), v.astype(f64)
                return narrow(
                    u * v if op == "mul" else add_odd(u, v if op == "add" else -v), f32, mode
                )
        elif bt == "f64":

            def calc(u, v):
                r, e = two_prod(u, v) if op == "mul" else two_sum(u, v if op == "add" else -v)
                return dir_adjust(r, e, mode)
        else:
            raise UnknownInstruction(ins.op)

        def fn(x, m):
            u, v = ga(x), gb(x)
            if z:
                u, v = ftz(u, bt), ftz(v, bt)
            r = calc(u, v)
            put(x, m, post(r) if post else r)

        return fn

    def c_fma(self, ins):
        P = ins.parts
        t = P[-1]
        d, a, b, c = ins.ops
        ta = t
        if len(self._types(P)) == 2:  # fma.rn.f32.bf16 d, a, b, c: a and b are converted
            t, ta = self._types(P)
            if t != "f32" or ta not in ("f16", "bf16"):
                raise UnknownInstruction(ins.op)
        ga, gb, gc = self.fsrc(a, ta), self.fsrc(b, ta), self.fsrc(c, t)
        mode = self._mode(P) or "rn"
        bt = X2.get(t, t)
        z = "ftz" in P
        post = self._fpost(P, t)
        put = self.fdst(d, t)
        if bt == "f64":

            def fn(x, m):
                u, v, w = ga(x), gb(x), gc(x)
                r = fma64(u, v, w)
                if mode != "rn":
                    p, e = two_prod(u, v)
                    s, e2 = two_sum(p, w)
                    r = dir_adjust(r, (s - r) + (e2 + e), mode)
                put(x, m, post(r) if post else r)

            return fn

        def fn(x, m):
            u, v, w = ga(x), gb(x), gc(x)
            if z:
                u, v, w = ftz(u, bt), ftz(v, bt), ftz(w, bt)
            r = add_odd(u.astype(f64) * v.astype(f64), w.astype(f64))
            if bt == "f32":
                r = narrow(r, f32, mode)
            put(x, m, post(r) if post else r)

        return fn

    def _fdiv(self, ins, t):
        P = ins.parts
        d, a, b = ins.ops
        ga, gb, put = self.fsrc(a, t), self.fsrc(b, t), self.fdst(d, t)
        mode = self._mode(P)
        z = "ftz" in P
        post = self._fpost(P, t)
        approx = "approx" in P
        full = "full" in P

        def fn(x, m):
            u, v = ga(x), gb(x)
            if z:
                u, v = ftz(u, t), ftz(v, t)
            if t == "f32" and mode not in (None, "rn"):
                r = narrow(u.astype(f64) / v.astype(f64), f32, mode)
            elif approx or full:
                r = x.ap(u.astype(f64) / v.astype(f64), 2.0)
                if approx:
                    r = np.where(
                        (np.abs(v) > f32(2.0**126)) & np.isfinite(v),
                        np.where(np.isinf(u), f32(np.nan), np.copysign(f32(0), u * np.sign(v))),
                        r,
                    )
            else:
                r = u / v
                if t == "f64":
                    r = dir_adjust(r, fma64(-r, v, u) * np.sign(v), mode)
            put(x, m, post(r) if post else r)

        return fn

    def _unary(self, ins, f, ulp, floor=0.0, error=None):
        """error: has the sign of the exact value minus the nearest double, to round as asked."""
        P = ins.parts
        t = P[-1]
        d, a = ins.ops
        ga = self.fsrc(a, t)
        mode = self._mode(P)
        bt = X2.get(t, t)
        z = "ftz" in P
        post = self._fpost(P, t)
        put = self.fdst(d, t)
        approx = "approx" in P

        def fn(x, m):
            u = ga(x)
            if z:
                u = ftz(u, bt)
            r = f(u.astype(f64))
            if bt == "f32":
                r = x.ap(r, ulp, floor) if approx else narrow(r, f32, mode or "rn")
            elif error and not approx:
                r = dir_adjust(r, error(r, u), mode)
            put(x, m, post(r) if post else r)

        return fn

    def c_rcp(self, ins):
        if (
            ins.parts[-1] == "f32"
            and (self._mode(ins.parts) in (None, "rn"))
            and "approx" not in ins.parts
        ):
            return self._exact(ins, lambda u: f32(1) / u)
        return self._unary(
            ins, lambda v: 1.0 / v, 1.0, error=lambda r, v: fma64(-r, v, 1.0) * np.sign(v)
        )

    def c_sqrt(self, ins):
        if (
            ins.parts[-1] == "f32"
            and (self._mode(ins.parts) in (None, "rn"))
            and "approx" not in ins.parts
        ):
            return self._exact(ins, np.sqrt)
        return self._unary(ins, np.sqrt, 1.0, error=lambda r, v: fma64(-r, r, v))

    def _exact(self, ins, f):
        ga, put = self.fsrc(ins.ops[1], "f32"), self.fdst(ins.ops[0], "f32")
        z = "ftz" in ins.parts

        def fn(x, m):
            u = ga(x)
            r = f(ftz(u) if z else u)
            put(x, m, ftz(r) if z else r)

        return fn

    def c_rsqrt(self, ins):
        return self._unary(ins, lambda v: 1.0 / np.sqrt(v), 2.0)

    def c_ex2(self, ins):
        return self._unary(ins, np.exp2, 2.0)

    def c_lg2(self, ins):
        return self._unary(ins, np.log2, 2.0, 1.0)

    def c_sin(self, ins):
        return self._unary(ins, np.sin, 6.0, 1.0)

    def c_cos(self, ins):
        return self._unary(ins, np.cos, 6.0, 1.0)

    def c_tanh(self, ins):
        return self._unary(ins, np.tanh, 4096.0)
