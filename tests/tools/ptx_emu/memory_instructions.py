"""Loads, stores, asynchronous copies and atomics."""

from __future__ import annotations

import numpy as np

from .errors import ParseError, UnknownInstruction
from .integers import atomic_fn
from .types import SIZE, UDT, X2, npdt, u8, u32, u64


class MemoryInstructions:
    """Loads, stores, asynchronous copies and atomics."""

    # memory
    def c_ld(self, ins):
        P = ins.parts
        t = self._types(P)[-1]
        d, a = ins.ops[0], ins.ops[1]
        if t == "b128":
            raise UnknownInstruction(ins.op)
        ds = d[1] if d[0] == "v" else [d]
        n = SIZE[t]
        sp = self.mem_space(P, a)
        puts = [self.dsti(e, t) for e in ds]
        nv = len(ds)
        if sp == "param" and a[1][0] == "var" and a[1][1].space == "param":
            off = a[1][1].addr + a[1][2] + a[2]
            if off + n * nv > self.param_size:
                raise ParseError("ld.param outside the parameters")
            UDT[n]
            pf = [self.dst(e, t) for e in ds]
            dt = npdt(t)

            def fn(x, m):
                for k, p in enumerate(pf):
                    p(x, m, x.pbuf.arr[off + k * n : off + (k + 1) * n].view(dt)[0])

            return fn
        if sp in ("shared", None):
            self.min_sh = min(self.min_sh, n)
        if sp in ("global", None):
            self.min_gl = min(self.min_gl, n)
        g = self.mem(a)

        def fn(x, m):
            idx = None if m is None else np.flatnonzero(m)
            vs = x.load(sp, idx, g(x, idx), n, nv, ins)
            for p, v in zip(puts, vs, strict=False):
                p(x, idx, v)

        return fn

    c_ldu = c_ld

    def c_st(self, ins):
        P = ins.parts
        if "async" in P or "bulk" in P:
            raise UnknownInstruction(ins.op)
        t = self._types(P)[-1]
        a, s = ins.ops[0], ins.ops[1]
        ss = s[1] if s[0] == "v" else [s]
        n = SIZE[t]
        ut = f"b{8 * n}"
        sp = self.mem_space(P, a)
        if sp == "param":
            sp = "local"
        if sp in ("shared", None):
            self.min_sh = min(self.min_sh, n)
        if sp in ("global", None):
            self.min_gl = min(self.min_gl, n)
        gs = [self.src(e, t if e[0] in "id" else ut) for e in ss]
        g = self.mem(a)
        ud = UDT[n]

        def fn(x, m):
            idx = None if m is None else np.flatnonzero(m)
            ad = g(x, idx)
            vals = []
            for q in gs:
                v = np.asarray(q(x))
                v = np.broadcast_to(v, x.T) if v.ndim == 0 else v
                v = v if idx is None else v[idx]
                vals.append(np.ascontiguousarray(v).view(ud))
            x.store(sp, idx, ad, n, vals, ins)

        return fn

    def c_cp(self, ins):
        P = ins.parts
        if P[1] != "async" or "bulk" in P or "mbarrier" in P:
            raise UnknownInstruction(ins.op)
        if P[2] == "commit_group":
            return lambda x, m: x.cp_commit(m)
        if P[2] in ("wait_group", "wait_all"):
            keep = ins.ops[0][1] if P[2] == "wait_group" else -1
            return lambda x, m: x.cp_wait(m, keep)
        gd, gs = self.mem(ins.ops[0]), self.mem(ins.ops[1])
        n = ins.ops[2][1]
        hint = "L2::cache_hint" in ins.op
        rest = ins.ops[3:]
        if hint:
            rest = rest[:-1]
        gz = None
        if rest:
            if (rest[0][0] == "r" and rest[0][1].type == "pred") or rest[0][0] == "n":
                gp = self.src(rest[0], "pred")

                def gz(x):
                    return np.where(gp(x), u32(0), u32(n))
            else:
                gz = self.src(rest[0], "u32")
        e = 8 if n >= 8 else 4
        k = n // e
        self.min_gl = min(self.min_gl, 1 if gz else e)
        self.min_sh = min(self.min_sh, e)

        def fn(x, m):
            idx = np.arange(x.T) if m is None else np.flatnonzero(m)
            da, sa = gd(x, idx), gs(x, idx)
            if gz is None:
                vals = x.load("global", idx, sa, e, k, ins)
            else:
                z = np.broadcast_to(np.asarray(gz(x)), x.T)[idx]
                out = np.zeros((len(idx), n), u8)
                for size in np.unique(z):
                    if size:
                        w = np.flatnonzero(z == size)
                        b = x.load("global", idx[w], sa[w], 1, int(size), ins)
                        for j in range(int(size)):
                            out[w, j] = b[j]
                vals = [
                    np.ascontiguousarray(out[:, j * e : (j + 1) * e]).view(UDT[e]).reshape(-1)
                    for j in range(k)
                ]
            x.cp_issue(idx, da, e, vals, ins)

        return fn

    def c_atom(self, ins, red=False):
        P = ins.parts
        t = self._types(P)[-1]
        if t == "b128":
            raise UnknownInstruction(ins.op)
        op = next(
            p
            for p in P[1:]
            if p in ("add", "min", "max", "and", "or", "xor", "cas", "exch", "inc", "dec")
        )
        if red:
            d, rest = None, ins.ops
        else:
            d, rest = ins.ops[0], ins.ops[1:]
        a, b = rest[0], rest[1]
        vb = b[1] if b[0] == "v" else [b]
        vd = None if d is None else (d[1] if d[0] == "v" else [d])
        n = SIZE[t]
        sp = self.mem_space(P, a)
        if sp in ("shared", None):
            self.min_sh = min(self.min_sh, n)
        if sp in ("global", None):
            self.min_gl = min(self.min_gl, n)
        ut = f"b{8 * n}"
        gb = [self.src(e, t if e[0] in "id" and t not in X2 else ut) for e in vb]
        gc = self.src(rest[2], ut) if op == "cas" else None
        g = self.mem(a)
        puts = None if vd is None else [self.dsti(e, ut) for e in vd]
        ud = UDT[n]
        comb = atomic_fn(op, t)

        def fn(x, m):
            idx = np.arange(x.T) if m is None else np.flatnonzero(m)
            ad = g(x, idx)

            def get(q):
                v = np.asarray(q(x))
                v = np.broadcast_to(v, x.T) if v.ndim == 0 else v
                return np.ascontiguousarray(v[idx]).view(ud)

            c = get(gc) if gc else None
            for k, q in enumerate(gb):
                old = x.atomic(sp, idx, ad + u64(k * n) if k else ad, n, get(q), c, comb, ins)
                if puts:
                    puts[k](x, idx, old)

        return fn

    def c_red(self, ins):
        if "async" in ins.parts:
            raise UnknownInstruction(ins.op)
        return self.c_atom(ins, True)
