"""Logic, shifts and bit fields."""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .integers import bitlen, lowmask, popc, shl64, shr64
from .types import SIZE, UDT, npdt, u32, u64


class Bits:
    """Logic, shifts and bit fields."""

    # logic
    def _logic(self, ins, f):
        t = ins.parts[-1]
        gs = [self.src(o, t) for o in ins.ops[1:]]
        put = self.dst(ins.ops[0], t)
        return lambda x, m: put(x, m, f(*[g(x) for g in gs]))

    def c_and(self, ins):
        return self._logic(ins, np.bitwise_and)

    def c_or(self, ins):
        return self._logic(ins, np.bitwise_or)

    def c_xor(self, ins):
        return self._logic(ins, np.bitwise_xor)

    def c_not(self, ins):
        return self._logic(ins, np.invert)

    def c_cnot(self, ins):
        return self._logic(ins, lambda a: (a == 0).astype(np.asarray(a).dtype))

    def c_lop3(self, ins):
        d = ins.ops[0]
        lut = ins.ops[4][1]
        ga, gb, gc = (self.src(o, "b32") for o in ins.ops[1:4])
        pput = None
        if d[0] == "pair":
            put, pput = self.dst(d[1], "b32"), self.dst(d[2], "pred")
            gq = self.src(ins.ops[5], "pred")
            isor = "or" in ins.parts
        else:
            put = self.dst(d, "b32")

        def fn(x, m):
            a, b, c = ga(x), gb(x), gc(x)
            r = u32(0)
            for k in range(8):
                if lut >> k & 1:
                    r = r | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
            put(x, m, r)
            if pput:
                pput(x, m, ((r != 0) | gq(x)) if isor else ((r != 0) & gq(x)))

        return fn

    def c_shl(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, gb, put = self.src(ins.ops[1], t), self.src(ins.ops[2], "u32"), self.dst(ins.ops[0], t)
        dt = npdt(t)
        if ins.ops[2][0] == "i":
            k = ins.ops[2][1]
            c = dt(k) if k < n else None
            return (
                (lambda x, m: put(x, m, ga(x) << c)) if k < n else (lambda x, m: put(x, m, dt(0)))
            )
        return lambda x, m: put(
            x, m, np.where(gb(x) >= n, dt(0), ga(x) << (gb(x) & u32(n - 1)).astype(dt))
        )

    def c_shr(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, gb, put = self.src(ins.ops[1], t), self.src(ins.ops[2], "u32"), self.dst(ins.ops[0], t)
        dt = npdt(t)
        if t[0] == "s":
            return lambda x, m: put(x, m, ga(x) >> np.minimum(gb(x), u32(n - 1)).astype(dt))
        return lambda x, m: put(
            x, m, np.where(gb(x) >= n, dt(0), ga(x) >> (gb(x) & u32(n - 1)).astype(dt))
        )

    def c_shf(self, ins):
        ga, gb, gc, put = (*[self.src(o, "b32") for o in ins.ops[1:]], self.dst(ins.ops[0], "b32"))
        left, wrap = "l" in ins.parts, "wrap" in ins.parts

        def fn(x, m):
            c = gc(x)
            n = ((c & u32(31)) if wrap else np.minimum(c, u32(32))).astype(u64)
            v = (gb(x).astype(u64) << u64(32)) | ga(x).astype(u64)
            put(x, m, (((v << n) >> u64(32)) if left else (v >> n)).astype(u32))

        return fn

    def c_prmt(self, ins):
        ga, gb, gc, put = (*[self.src(o, "b32") for o in ins.ops[1:]], self.dst(ins.ops[0], "b32"))
        mode = ins.parts[2] if len(ins.parts) > 2 else None

        def fn(x, m):
            v = (gb(x).astype(u64) << u64(32)) | ga(x).astype(u64)
            c = gc(x).astype(u64)
            r = u64(0)
            for k in range(4):
                if mode is None:
                    s = (c >> u64(4 * k)) & u64(15)
                else:
                    q = c & u64(3)
                    if mode == "f4e":
                        s = q + u64(k)
                    elif mode == "b4e":
                        s = (q - u64(k)) & u64(7)
                    elif mode == "rc8":
                        s = q
                    elif mode == "ecl":
                        s = np.maximum(q, u64(k))
                    elif mode == "ecr":
                        s = np.minimum(q, u64(k))
                    elif mode == "rc16":
                        s = (q & u64(1)) * u64(2) + u64(k & 1)
                    else:
                        raise UnknownInstruction(ins.op)
                b = (v >> ((s & u64(7)) * u64(8))) & u64(255)
                if mode is None:
                    b = np.where(s & u64(8), np.where(b & u64(128), u64(255), u64(0)), b)
                r = r | (b << u64(8 * k))
            put(x, m, r.astype(u32))

        return fn

    def c_bfe(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga = self.src(ins.ops[1], f"u{n}")
        gb, gc, put = (
            self.src(ins.ops[2], "u32"),
            self.src(ins.ops[3], "u32"),
            self.dst(ins.ops[0], f"u{n}"),
        )
        sg = t[0] == "s"

        def fn(x, m):
            a = ga(x).astype(u64)
            pos, ln = (gb(x) & u32(255)).astype(u64), (gc(x) & u32(255)).astype(u64)
            eff = np.where(pos >= n, u64(0), np.minimum(ln, u64(n) - np.minimum(pos, u64(n))))
            mask = lowmask(eff)
            d = shr64(a, pos) & mask
            if sg:
                sp = np.minimum(pos + ln - u64(1), u64(n - 1))
                sb = (shr64(a, sp) & u64(1)).astype(bool) & (ln != 0)
                d = np.where(sb, d | ~mask, d)
            put(x, m, d.astype(UDT[n // 8]))

        return fn

    def c_bfi(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, gb = self.src(ins.ops[1], t), self.src(ins.ops[2], t)
        gc, gd, put = (
            self.src(ins.ops[3], "u32"),
            self.src(ins.ops[4], "u32"),
            self.dst(ins.ops[0], t),
        )

        def fn(x, m):
            pos, ln = (gc(x) & u32(255)).astype(u64), (gd(x) & u32(255)).astype(u64)
            mask = shl64(lowmask(np.minimum(ln, u64(64))), pos)
            d = (gb(x).astype(u64) & ~mask) | (shl64(ga(x).astype(u64), pos) & mask)
            put(x, m, d.astype(UDT[n // 8]))

        return fn

    def c_bmsk(self, ins):
        ga, gb, put = (
            self.src(ins.ops[1], "u32"),
            self.src(ins.ops[2], "u32"),
            self.dst(ins.ops[0], "b32"),
        )
        wrap = "wrap" in ins.parts

        def fn(x, m):
            a, b = ga(x).astype(u64), gb(x).astype(u64)
            if wrap:
                a, b = a & u64(31), b & u64(31)
            put(x, m, shl64(lowmask(np.minimum(b, u64(32))), np.minimum(a, u64(32))).astype(u32))

        return fn

    def c_szext(self, ins):
        t = ins.parts[-1]
        ga, gb, put = (
            self.src(ins.ops[1], "u32"),
            self.src(ins.ops[2], "u32"),
            self.dst(ins.ops[0], "b32"),
        )
        wrap = "wrap" in ins.parts

        def fn(x, m):
            a, n = ga(x).astype(u64), gb(x).astype(u64)
            n = n & u64(31) if wrap else np.minimum(n, u64(32))
            mask = lowmask(n)
            r = a & mask
            if t == "s32":
                sb = (shr64(a, np.maximum(n, u64(1)) - u64(1)) & u64(1)).astype(bool) & (n > 0)
                r = np.where(sb, r | ~mask, r)
            put(x, m, r.astype(u32))

        return fn

    def c_popc(self, ins):
        t = ins.parts[-1]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], "u32")
        return lambda x, m: put(x, m, popc(ga(x)))

    def c_clz(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], "u32")
        return lambda x, m: put(x, m, u32(n) - bitlen(ga(x)))

    def c_bfind(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], "u32")
        sh = "shiftamt" in ins.parts

        def fn(x, m):
            a = ga(x)
            if t[0] == "s":
                a = np.where(a < 0, ~a, a).astype(UDT[n // 8])
            length = bitlen(a)
            r = length - u32(1)
            if sh:
                r = np.where(length == 0, u32(0xFFFFFFFF), u32(n - 1) - r)
            put(x, m, r)

        return fn

    def c_brev(self, ins):
        t = ins.parts[-1]
        n = 8 * SIZE[t]
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], t)
        dt = npdt(t)

        def fn(x, m):
            a = ga(x)
            r = dt(0)
            for k in range(n):
                r = r | (((a >> dt(k)) & dt(1)) << dt(n - 1 - k))
            put(x, m, r)

        return fn
