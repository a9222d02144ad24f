"""Conversions between types (cvt)."""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .floats import fp8_decode, fp8_encode, ftz, narrow, narrow_ld
from .types import FLOATS, MAXF, SIZE, X2, f32, f64, npdt, u16, u32


class Conversions:
    """Conversions between types (cvt)."""

    def c_cvt(self, ins):
        P = ins.parts
        ty = [p for p in P[1:] if p in SIZE or p in ("e4m3", "e5m2")]
        dt, st = ty[0], ty[1]
        if len(ty) > 2 or "pack" in P or "rs" in P:
            raise UnknownInstruction(ins.op)
        mode = self._mode(P)
        imode = next((p for p in P if p in ("rni", "rzi", "rmi", "rpi")), None)
        z, sat, relu, satf = "ftz" in P, "sat" in P, "relu" in P, "satfinite" in P
        d = ins.ops[0]
        irnd = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, None: None}[imode]

        def clampf(v, t):
            if relu:
                v = np.where(v < 0, v.dtype.type(0), v)
            if satf:
                v = np.where(np.isnan(v), v, np.clip(v, -MAXF[t], MAXF[t]))
            if sat:
                v = np.where(np.isnan(v), v.dtype.type(0), np.clip(v, 0, 1))
            return v

        # packed destinations: cvt.rn.f16x2.f32 d, a, b : a -> high half, b -> low half
        if dt in ("f16x2", "bf16x2") and st == "f32":
            b = X2[dt]
            ga, gb, put = (
                self.fsrc(ins.ops[1], "f32"),
                self.fsrc(ins.ops[2], "f32"),
                self.fdst(d, dt, mode or "rn"),
            )

            def fn(x, m):
                v = np.stack(
                    np.broadcast_arrays(np.atleast_1d(gb(x)), np.atleast_1d(ga(x))), 1
                ).astype(f64)
                put(x, m, clampf(v, b))

            return fn
        if dt in ("e4m3x2", "e5m2x2"):
            kind = dt[:4]
            put = self.dst(d, "b16")
            if st == "f32":
                ga, gb = self.fsrc(ins.ops[1], "f32"), self.fsrc(ins.ops[2], "f32")

                def fn(x, m):
                    hi, lo = fp8_encode(clampr(ga(x)), kind), fp8_encode(clampr(gb(x)), kind)
                    put(x, m, (hi.astype(u16) << u16(8)) | lo)
            else:
                ga = self.fsrc(ins.ops[1], st)

                def fn(x, m):
                    v = fp8_encode(clampr(ga(x)), kind)
                    put(x, m, (v[:, 1].astype(u16) << u16(8)) | v[:, 0])

            def clampr(v):
                return np.where(v < 0, 0, v) if relu else v

            return fn
        if st in ("e4m3x2", "e5m2x2"):
            kind = st[:4]
            ga, put = self.src(ins.ops[1], "b16"), self.fdst(d, dt)

            def fn(x, m):
                a = np.atleast_1d(ga(x))
                put(x, m, fp8_decode(np.stack([a & u16(255), a >> u16(8)], 1), kind))

            return fn
        if dt == "tf32":
            ga, put = self.src(ins.ops[1], "b32"), self.dst(d, "b32")

            def fn(x, m):
                a = ga(x)
                v = np.atleast_1d(a).view(f32)
                r = (
                    (a + u32(0x1000)) & u32(0xFFFFE000)
                    if mode == "rna"
                    else (a + u32(0xFFF) + ((a >> u32(13)) & u32(1))) & u32(0xFFFFE000)
                    if mode == "rn"
                    else a & u32(0xFFFFE000)
                )
                r = np.where(np.isnan(v), u32(0x7FFFFFFF), np.where(np.isinf(v), a, r))
                put(x, m, np.where(v < 0, u32(0), r) if relu else r)

            return fn
        if dt in X2 or st in X2:
            raise UnknownInstruction(ins.op)
        df, sf = dt in FLOATS, st in FLOATS
        if not sf and not df:  # int -> int
            ga, put = self.src(ins.ops[1], st), self.dst(d, dt)
            if sat:
                info = np.iinfo(npdt(dt))
                src_info = np.iinfo(npdt(st))
                lo, hi = max(info.min, src_info.min), min(info.max, src_info.max)
                nd = npdt(dt)
                return lambda x, m: put(x, m, np.clip(ga(x), npdt(st)(lo), npdt(st)(hi)).astype(nd))
            nd = npdt(dt)
            return lambda x, m: put(x, m, ga(x).astype(nd))
        if not sf and df:  # int -> float
            ga = self.src(ins.ops[1], st)
            put = self.fdst(d, dt, mode or "rn")
            md = mode or "rn"

            def fn(x, m):
                a = ga(x)
                if dt == "f64":
                    v = a.astype(f64)
                    if md != "rn":
                        v = np.asarray(narrow_ld(a, f64, md))
                elif SIZE[st] == 8:
                    v = (
                        a.astype(f32)
                        if md == "rn" and dt == "f32"
                        else narrow_ld(a, f32 if dt == "f32" else f64, md)
                    )
                else:
                    v = a.astype(f64)
                    if dt == "f32":
                        v = narrow(v, f32, md)
                put(x, m, clampf(v, dt) if sat else v)

            return fn
        if sf and not df:  # float -> int (saturating, NaN -> 0)
            ga, put = self.fsrc(ins.ops[1], st), self.dst(d, dt)
            nd = npdt(dt)
            info = np.iinfo(nd)
            r_ = irnd or np.trunc

            def fn(x, m):
                v = ga(x)
                if z and st == "f32":
                    v = ftz(v)
                v = r_(v.astype(f64))
                big, small = (
                    v >= float(info.max) + (1.0 if info.max < 2**53 else 0),
                    v <= float(info.min),
                )
                ok = np.where(big | small | np.isnan(v), 0.0, v).astype(nd)
                put(x, m, np.where(big, nd(info.max), np.where(small, nd(info.min), ok)))

            return fn
        ga, put = self.fsrc(ins.ops[1], st), self.fdst(d, dt, mode or "rn")

        def fn(x, m):
            v = ga(x)
            if z and st == "f32":
                v = ftz(v)
            if irnd:
                v = irnd(v)
            if sat or relu or satf:
                v = clampf(v, dt)
            if dt == "f32" and st == "f64":
                v = narrow(v, f32, mode or "rn")
            elif dt in ("f16", "bf16"):
                v = v.astype(f64) if st == "f64" or mode not in (None, "rn") or dt == "f16" else v
            if z and dt == "f32":
                v = ftz(np.asarray(v, f32))
            put(x, m, v)

        return fn
