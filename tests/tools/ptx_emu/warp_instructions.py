"""Barriers, shuffles, votes and reductions."""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .integers import bits32
from .syntax import K_BAR, K_WARP
from .types import f32, i64, u32


class WarpInstructions:
    """Barriers, shuffles, votes and reductions."""

    # barriers
    def c_bar(self, ins):
        P = ins.parts
        if "warp" in P:
            ins.kind = K_WARP
            ins.aux = self.src(ins.ops[0], "b32")

            def fn(x, m):
                x.warp_sync(m)

            return fn
        kind = next((p for p in P[1:] if p in ("sync", "arrive", "red")), None)
        if kind is None or "cluster" in P:
            raise UnknownInstruction(ins.op)
        ins.kind = K_BAR
        ops = ins.ops
        if kind == "red":
            rop = next(p for p in P if p in ("popc", "and", "or"))
            dst = self.dst(ops[0], "u32" if rop == "popc" else "pred")
            pr = self.src(ops[-1], "pred")
            bid = self.src(ops[1], "u32")
            cnt = self.src(ops[2], "u32") if len(ops) == 4 else None
            ins.aux = ("red", bid, cnt, rop, dst, pr)
        else:
            bid = self.src(ops[0], "u32") if ops else (lambda x: u32(0))
            cnt = self.src(ops[1], "u32") if len(ops) > 1 else None
            ins.aux = (kind, bid, cnt)
        return None

    c_barrier = c_bar

    # warp-level
    def c_shfl(self, ins):
        P = ins.parts
        sync = "sync" in P
        mode = P[2] if sync else P[1]
        d, a, b, c = ins.ops[:4]
        pput = None
        if d[0] == "pair":
            put, pput = self.dst(d[1], "b32"), self.dst(d[2], "pred")
        else:
            put = self.dst(d, "b32")
        ga, gb, gc = self.src(a, "b32"), self.src(b, "u32"), self.src(c, "u32")
        if sync:
            ins.kind = K_WARP
            ins.aux = self.src(ins.ops[4], "b32")

        def fn(x, m):
            lane = x.lane
            bv, cv = (gb(x).astype(i64) & 31), gc(x).astype(i64)
            seg, cl = (cv >> 8) & 31, cv & 31
            mn = lane & seg
            mx = mn | (cl & ~seg)
            if mode == "up":
                j = lane - bv
                p = j >= mx
            elif mode == "down":
                j = lane + bv
                p = j <= mx
            elif mode == "bfly":
                j = lane ^ bv
                p = j <= mx
            elif mode == "idx":
                j = mn | (bv & ~seg)
                p = j <= mx
            else:
                raise UnknownInstruction(ins.op)
            j = np.where(p, j, lane) + x.wbase
            a = np.asarray(ga(x))
            a = np.broadcast_to(a, x.T) if a.ndim == 0 else a
            r = a[j]
            if m is not None:
                bad = ~m[j] & m
                nb = np.count_nonzero(bad)
                if nb:
                    x.warn(f"shfl reads an inactive or exited lane: {ins!r}", nb)
                    r = np.where(m[j], r, u32(0x7FFFDEAD))
            if sync:
                mm = np.asarray(ins.aux(x))
                if mm.ndim or int(mm) != 0xFFFFFFFF:
                    out = ((mm >> (j & 31).astype(u32)) & u32(1)) == 0
                    out = out if m is None else out & m
                    if out.any():
                        x.warn(
                            f"shfl reads a lane outside its membermask: {ins!r}",
                            np.count_nonzero(out),
                        )
                        r = np.where(out, u32(0x7FFFDEAD), r)
            put(x, m, r)
            if pput:
                pput(x, m, p)

        return fn

    def c_vote(self, ins):
        P = ins.parts
        sync = "sync" in P
        mode = next(p for p in P if p in ("all", "any", "uni", "ballot"))
        d, a = ins.ops[:2]
        ga = self.src(a, "pred")
        put = self.dst(d, "b32" if mode == "ballot" else "pred")
        if sync:
            ins.kind = K_WARP
            ins.aux = self.src(ins.ops[2], "b32")

        def fn(x, m):
            act, spread, rows = x.group(m, ins)
            p = rows(ga(x))
            if mode == "ballot":
                r = bits32(p & act)
            elif mode == "any":
                r = (p & act).any(1)
            elif mode == "all":
                r = (p | ~act).all(1)
            else:
                r = (p | ~act).all(1) | (~p | ~act).all(1)
            put(x, m, spread(r))

        return fn

    def c_activemask(self, ins):
        put = self.dst(ins.ops[0], "b32")

        def fn(x, m):
            act = (np.ones(x.T, bool) if m is None else m).reshape(-1, 32)
            put(x, m, np.repeat(bits32(act), 32))

        return fn

    def c_elect(self, ins):
        d = ins.ops[0]
        pd, pp = (d[1], d[2]) if d[0] == "pair" else (("_",), d)
        put, pput = self.dst(pd, "b32"), self.dst(pp, "pred")
        ins.kind = K_WARP
        ins.aux = self.src(ins.ops[1], "b32")

        def fn(x, m):
            act, spread, _rows = x.group(m, ins)
            first = spread(act.argmax(1))
            put(x, m, first.astype(u32))
            pput(x, m, x.lane == first)

        return fn

    def c_match(self, ins):
        P = ins.parts
        t = P[-1]
        d = ins.ops[0]
        if d[0] == "pair":
            put, pput = self.dst(d[1], "b32"), self.dst(d[2], "pred")
        else:
            put, pput = self.dst(d, "b32"), None
        ga = self.src(ins.ops[1], t)
        ins.kind = K_WARP
        ins.aux = self.src(ins.ops[2], "b32")
        allm = "all" in P

        def fn(x, m):
            act, spread, _rows = x.group(m, ins)
            own = np.broadcast_to(np.asarray(ga(x)), x.T)
            act = spread(act)  # one row a lane
            eq = (np.repeat(own.reshape(-1, 32), 32, axis=0) == own[:, None]) & act
            if allm:
                ok = (eq | ~act).all(1)
                put(x, m, np.where(ok, bits32(act), u32(0)))
                if pput:
                    pput(x, m, ok)
            else:
                put(x, m, bits32(eq))

        return fn

    def c_redux(self, ins):
        P = ins.parts
        t = P[-1]
        op = next(p for p in P if p in ("add", "min", "max", "and", "or", "xor"))
        ga, put = self.src(ins.ops[1], t), self.dst(ins.ops[0], t)
        ins.kind = K_WARP
        ins.aux = self.src(ins.ops[2], "b32")
        ab, nan = "abs" in P, "NaN" in P

        def fn(x, m):
            act, spread, rows = x.group(m, ins)
            a = rows(ga(x))
            a = np.abs(a) if ab else a
            if t == "f32":
                f = {"min": np.minimum if nan else np.fmin, "max": np.maximum if nan else np.fmax}[
                    op
                ]
                idn = f32(np.inf if op == "min" else -np.inf)
            else:
                f = {
                    "add": np.add,
                    "min": np.minimum,
                    "max": np.maximum,
                    "and": np.bitwise_and,
                    "or": np.bitwise_or,
                    "xor": np.bitwise_xor,
                }[op]
                inf = np.iinfo(a.dtype)
                idn = a.dtype.type(
                    {"min": inf.max, "max": inf.min, "and": -1 if inf.min < 0 else inf.max}.get(
                        op, 0
                    )
                )
            v = np.where(act, a, idn)
            r = f.reduce(v, axis=1, dtype=v.dtype)
            put(x, m, spread(r))

        return fn
