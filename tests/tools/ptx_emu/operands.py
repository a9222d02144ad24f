"""Access to registers, constants and addresses: functions of a launch for each operand."""

from __future__ import annotations

import numpy as np

from .errors import ParseError
from .floats import bf2f, f2bf, narrow
from .types import SDT, SIZE, UDT, WIN, X2, f16, f32, f64, npdt, u16, u32, u64


class Operands:
    """Access to registers, constants and addresses: functions of a launch for each operand."""

    def vslot(self, reg, dt):
        if reg.id is None:
            reg.id = len(self.regs)
            self.regs.append(reg)
        k = (reg.id, np.dtype(dt))
        s = self.slotmap.get(k)
        if s is None:
            s = self.slotmap[k] = len(self.slots)
            self.slots.append(k)
        return s

    def src(self, o, t):
        k = o[0]
        if t == "pred":
            if k == "r":
                s = self.vslot(o[1], np.bool_)
                return lambda x: x.V[s]
            if k == "n":
                g = self.src(o[1], "pred")
                return lambda x: ~g(x)
            if k == "i":
                c = np.bool_(o[1] != 0)
                return lambda x: c
            raise ParseError("predicate operand")
        n, dt = SIZE[t], npdt(t)
        if k == "r":
            r = o[1]
            if r.size == n:
                s = self.vslot(r, dt)
                return lambda x: x.V[s]
            if r.size > n:
                s = self.vslot(r, UDT[r.size])
                ud = UDT[n]
                return lambda x: x.V[s].astype(ud).view(dt)
            raise ParseError(f"register {r.name} narrower than .{t}")
        if k == "i":
            c = dt(o[1]) if t in ("f32", "f64") else UDT[n](o[1] & (1 << 8 * n) - 1).view(dt)
            return lambda x: c
        if k == "f":
            v = u32(o[1]).view(f32) if o[2] == 4 else u64(o[1]).view(f64)
            if o[2] == n:
                c = UDT[n](o[1]).view(dt)
            elif t in ("f32", "f64", "f16"):
                c = dt(v)
            elif t == "bf16":
                c = f2bf(f32(v))[()]
            else:
                c = UDT[n](o[1] & ((1 << 8 * n) - 1)).view(dt)
            return lambda x: c
        if k == "d":
            c = (
                dt(o[1])
                if t in ("f16", "f32", "f64")
                else (
                    f2bf(f32(o[1]))[()]
                    if t == "bf16"
                    else f32(o[1]).view(u32)
                    if n == 4
                    else f64(o[1]).view(u64)
                )
            )
            return lambda x: c
        if k == "s":
            nm = o[1]
            return lambda x: x.sreg(nm).astype(UDT[n]).view(dt)
        if k in ("var", "gen"):
            a = self.addr(o[1]) + o[2]
            if k == "gen":
                a += WIN.get(o[1].space, 0)
            c = UDT[n](a & ((1 << 8 * n) - 1)).view(dt)
            return lambda x: c
        raise ParseError(f"operand {o}")

    def dst(self, o, t):
        """Put(x, m, val): full-width value, masked by m (None = all)."""
        if o[0] == "_":
            return lambda x, m, v: None
        r = o[1]
        if t == "pred":
            s = self.vslot(r, np.bool_)
        else:
            n = SIZE[t]
            if r.size == n:
                s = self.vslot(r, npdt(t))
            elif r.size > n:
                dt = npdt(t)
                if t[0] == "s":
                    s = self.vslot(r, SDT[r.size])
                else:
                    s = self.vslot(r, UDT[r.size])
                    dt = UDT[n]
                sdt = npdt(t)

                def put(x, m, v):
                    v = np.asarray(v).astype(sdt).view(dt)
                    if m is None:
                        x.V[s][...] = v
                    else:
                        np.copyto(x.V[s], v, where=m, casting="unsafe")

                return put
            else:
                raise ParseError(f"register {r.name} narrower than .{t}")

        def put(x, m, v):
            if m is None:
                x.V[s][...] = v
            else:
                np.copyto(x.V[s], v, where=m, casting="unsafe")

        return put

    def dsti(self, o, t):
        """Puti(x, idx, val): val only for the active lanes idx (None = all)."""
        if o[0] == "_":
            return lambda x, idx, v: None
        r = o[1]
        n = SIZE[t]
        dt = npdt(t)
        if r.size < n:
            raise ParseError(f"register {r.name} narrower than .{t}")
        if r.size == n:
            s = self.vslot(r, dt)
        else:
            s = self.vslot(r, SDT[r.size] if t[0] == "s" else UDT[r.size])
            if t[0] != "s":
                dt = UDT[n]

        def put(x, idx, v):  # v: unsigned raw array of n bytes
            v = v.view(dt)
            if idx is None:
                x.V[s][...] = v
            else:
                x.V[s][idx] = v

        return put

    def mem(self, o):
        """Address getter: (x, idx) -> uint64 addresses of the active lanes."""
        if o[0] != "m":
            raise ParseError(f"address operand {o}")
        base, off = o[1], o[2]
        if base[0] == "r":
            r = base[1]
            if r.size not in (4, 8):
                raise ParseError("address register size")
            s = self.vslot(r, UDT[r.size])
            if r.size == 8:
                c = u64(off & (2**64 - 1))
                if off == 0:
                    return lambda x, idx: x.V[s] if idx is None else x.V[s][idx]
                return lambda x, idx: (x.V[s] if idx is None else x.V[s][idx]) + c
            c = u32(off & 0xFFFFFFFF)
            return lambda x, idx: ((x.V[s] if idx is None else x.V[s][idx]) + c).astype(u64)
        g = self.src(base, "u64")
        c = u64(off & (2**64 - 1))
        return lambda x, idx: np.full(x.T if idx is None else len(idx), g(x) + c, u64)

    def mem_space(self, parts, o):
        sp = None
        for p in parts:
            q = p.split("::")[0]
            if q in ("global", "shared", "local", "param", "const"):
                sp = q
        if sp == "param" and o[1][0] == "var" and o[1][1].space == "local":
            sp = "local"
        return sp

    def fsrc(self, o, t):
        """Float operand as compute array (f16/bf16 -> float32; x2 -> (T,2))."""
        b = X2.get(t)
        if b:
            g = self.src(o, "b32" if SIZE[t] == 4 else "b64")
            if b == "bf16":
                return lambda x: bf2f(np.atleast_1d(g(x)).view(u16).reshape(-1, 2))
            if b == "f16":
                return lambda x: np.atleast_1d(g(x)).view(f16).reshape(-1, 2).astype(f32)
            dt = npdt(b)
            return lambda x: np.atleast_1d(g(x)).view(dt).reshape(-1, 2)
        g = self.src(o, t)
        if t == "f16":
            return lambda x: g(x).astype(f32)
        if t == "bf16":
            return lambda x: bf2f(g(x))
        return g

    def fdst(self, o, t, mode="rn"):
        b = X2.get(t, t)
        if b == "bf16":

            def fin(v):
                return f2bf(v, mode)
        elif b == "f16":

            def fin(v):
                return narrow(v, f16, mode)
        elif b in ("f32", "f64"):
            dt = npdt(b)

            def fin(v):
                return np.asarray(v).astype(dt, copy=False)
        else:
            dt = npdt(b)

            def fin(v):
                return np.asarray(v).astype(dt)

        if t in X2:
            n = SIZE[t]
            put = self.dst(o, f"b{8 * n}")
            return lambda x, m, v: put(x, m, np.ascontiguousarray(fin(v)).view(UDT[n]).reshape(-1))
        put = self.dst(o, t)
        return lambda x, m, v: put(x, m, fin(v))
