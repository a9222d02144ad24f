"""Checked access to global, shared and local memory."""

from __future__ import annotations

import numpy as np

from .errors import Misaligned, OutOfBounds
from .types import LO_SLOT, PA_SLOT, SH_SLOT, SLOT, UDT, WIN, i32, i64, u64

STRONG = {
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "mmio",
}  # accesses meant for inter-thread communication


class MemoryAccess:
    """Checked access to global, shared and local memory."""

    def _oob(self, kind, lanes, addr, k, size, ins, what):
        a = int(addr[k])
        lane = int(lanes[k])
        raise OutOfBounds(
            f"{what}: {size}-byte {kind} at address {a:#x} by {self.who(lane)} at {ins!r}"
        )

    def _lanes(self, idx):
        return np.arange(self.T) if idx is None else idx

    def _place(self, sp, idx, addr, size, ins, kind):
        """-> list of (selection or None, Buffer, byte offsets in it, space)"""
        if sp in (None, "global", "const"):
            sl = addr >> u64(SLOT)
            s0 = sl[0]
            if (sl == s0).all():
                return [self._place1(sp, int(s0), None, idx, addr, size, ins, kind)]
            out = []
            for s in np.unique(sl):
                w = np.flatnonzero(sl == s)
                out.append(self._place1(sp, int(s), w, idx, addr, size, ins, kind))
            return out
        return [self._window(sp, None, idx, addr, size, ins, kind)]

    def _place1(self, sp, s, w, idx, addr, size, ins, kind):
        a = addr if w is None else addr[w]
        if sp is None and s in (SH_SLOT, LO_SLOT, PA_SLOT):
            name = {SH_SLOT: "shared", LO_SLOT: "local", PA_SLOT: "param"}[s]
            return self._window(name, w, idx, a - u64(WIN[name]), size, ins, kind)
        buf = self.bufs.get(s)
        lanes = self._lanes(idx)
        lanes = lanes if w is None else lanes[w]
        if buf is None:
            self._oob(kind, lanes, a, 0, size, ins, "access to no buffer (null or wild pointer)")
        off = a - u64(buf.base)
        bad = off > u64(buf.n - size) if buf.n >= size else np.ones(off.shape, bool)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            self._oob(
                kind,
                lanes,
                a,
                k,
                size,
                ins,
                f"out of bounds of {buf.name} ({buf.n} bytes) at byte offset "
                f"{int(off[k].view(i64))} ({int(bad.sum())} threads)",
            )
        if size > 1 and (a & u64(size - 1)).any():
            k = int(np.flatnonzero(a & u64(size - 1))[0])
            raise Misaligned(
                f"misaligned {size}-byte {kind} at offset {int(off[k])} of {buf.name} "
                f"by {self.who(int(lanes[k]))} at {ins!r}"
            )
        return (w, buf, off, "global")

    def _window(self, name, w, idx, a, size, ins, kind):
        lanes = self._lanes(idx)
        lanes = lanes if w is None else lanes[w]
        n = {"shared": self.smem_size, "local": self.L, "param": self.prog.param_size}[name]
        bad = a > u64(n - size) if n >= size else np.ones(a.shape, bool)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            self._oob(
                kind,
                lanes,
                a,
                k,
                size,
                ins,
                f"out of bounds of {name} memory ({n} bytes, {int(bad.sum())} threads)",
            )
        if size > 1 and (a & u64(size - 1)).any():
            k = int(np.flatnonzero(a & u64(size - 1))[0])
            raise Misaligned(
                f"misaligned {size}-byte {kind} at {name} address {int(a[k]):#x} "
                f"by {self.who(int(lanes[k]))} at {ins!r}"
            )
        if name == "shared":
            return (w, self.smem, a + (self.blk[lanes] * self.S).astype(u64), "shared")
        if name == "local":
            return (w, self.lmem, a + (lanes * self.L).astype(u64), "local")
        return (w, self.pbuf, a, "param")

    def _sectors(self, lanes, addr):
        key = (addr >> u64(5)) + ((lanes >> 5).astype(u64) << u64(44))
        d = key[1:] != key[:-1]
        if key.size > 1 and (key[1:] < key[:-1]).any():
            return len(np.unique(key))
        return 1 + int(np.count_nonzero(d))

    def _wavefronts(self, lanes, off, size):
        ph = max(1, size // 4)
        grp = (lanes >> 5) * ph + (lanes & 31) // (32 // ph)
        words = off >> u64(2)
        reps = max(1, size // 4)
        key = np.unique(
            np.concatenate([(grp.astype(u64) << u64(32)) + words + u64(k) for k in range(reps)])
        )
        gb = ((key >> u64(32)) << u64(5)) | (key & u64(31))
        g, c = np.unique(gb, return_counts=True)
        gg = g >> u64(5)
        mx = np.zeros(int(gg.max()) + 1, np.int64)
        np.maximum.at(mx, gg.astype(np.int64), c)
        return int(mx.sum())

    def load(self, sp, idx, addr, n, nv, ins):
        size = n * nv
        pl = self._place(sp, idx, addr, size, ins, "load")
        cnt = addr.size
        outs = None if len(pl) == 1 else [np.empty(cnt, UDT[n]) for _ in range(nv)]
        for w, buf, off, space in pl:
            e = off // u64(n)
            vs = [buf.v[n][e + u64(k) if k else e] for k in range(nv)]
            lanes = self._lanes(idx)
            lanes = lanes if w is None else lanes[w]
            if space == "global":
                self.g["bytes_read"] += size * off.size
                self.g["loads"] += off.size
                self.g["sectors_read"] += self._sectors(lanes, off + u64(buf.base))
                if self.race_global and not STRONG.intersection(ins.parts):
                    self._g_read(buf, lanes, off, size, ins)
                if size in (1, 2, 4, 8, 16, 32):
                    buf.mark("rd", off, size)
                else:
                    for k in range(nv):
                        buf.mark("rd", off + u64(k * n), n)
            elif space == "shared":
                self.s["loads"] += off.size
                self.s["bytes_read"] += size * off.size
                if self.bank:
                    self.s["wavefronts"] += self._wavefronts(lanes, off, size)
                self._sh_read(lanes, off, size, ins)
            elif space == "local":
                self.local_bytes += size * off.size
            if outs is None:
                return vs
            for o, v in zip(outs, vs, strict=False):
                o[w] = v
        return outs

    def store(self, sp, idx, addr, n, vals, ins):
        nv = len(vals)
        size = n * nv
        for w, buf, off, space in self._place(sp, idx, addr, size, ins, "store"):
            lanes = self._lanes(idx)
            lanes = lanes if w is None else lanes[w]
            vv = vals if w is None else [v[w] for v in vals]
            e = off // u64(n)
            if space == "global":
                if sp == "const" or buf.arr.flags.writeable is False:
                    raise OutOfBounds(f"store to read-only {buf.name} at {ins!r}")
                self.g["bytes_written"] += size * off.size
                self.g["stores"] += off.size
                self.g["sectors_written"] += self._sectors(lanes, off + u64(buf.base))
                if self.race_global and not STRONG.intersection(ins.parts):
                    self._g_write(buf, lanes, off, n, vv, ins)
                if size in (1, 2, 4, 8, 16, 32):
                    buf.mark("wr", off, size)
                else:
                    for k in range(nv):
                        buf.mark("wr", off + u64(k * n), n)
            elif space == "shared":
                self.s["stores"] += off.size
                self.s["bytes_written"] += size * off.size
                if self.bank:
                    self.s["wavefronts"] += self._wavefronts(lanes, off, size)
                self._sh_write(lanes, off, n, vv, ins)
            elif space == "local":
                self.local_bytes += size * off.size
            elif space == "param":
                raise OutOfBounds(f"store to parameter space at {ins!r}")
            for k in range(nv):
                buf.v[n][e + u64(k) if k else e] = vv[k]

    # cp.async: the data arrive at the wait (cp_async='sync' makes the copy at once)
    def cp_issue(self, idx, da, e, vals, ins):
        if self.cp_sync:
            return self.store("shared", idx, da, e, vals, ins)
        ((_, _, off, _),) = self._place("shared", idx, da, e * len(vals), ins, "cp.async")
        if self.race:
            cell, k = self._gran(off, e * len(vals))
            t = np.repeat(idx, k).astype(i32)
            rd = (self.r_e[cell] == self.epoch[self.blk[t]]) & (
                (self.r_t[cell] != t) | self.r_mw[cell] | self.r_mt[cell]
            )
            if rd.any():
                j = np.flatnonzero(rd)
                self._report(
                    "cp.async over data read in this barrier interval",
                    cell[j],
                    self.r_t[cell[j]],
                    t[j],
                    ins,
                )
            self.pend[cell] += 1
        self.cpq.append([idx, self.cpg[idx].copy(), da, e, vals, ins])
        return None

    def cp_commit(self, m):
        self.cpg[slice(None) if m is None else m] += 1

    def cp_wait(self, m, keep):
        q = []
        for ent in self.cpq:
            idx, gid, da, e, vals, ins = ent
            sel = np.ones(idx.size, bool) if keep < 0 else gid < self.cpg[idx] - keep
            if m is not None:
                sel = sel & m[idx]
            if not sel.any():
                q.append(ent)
                continue
            rest = ~sel
            w = np.flatnonzero(sel)
            if self.race:
                ((_, _, off, _),) = self._place(
                    "shared", idx[w], da[w], e * len(vals), ins, "cp.async"
                )
                np.subtract.at(self.pend, self._gran(off, e * len(vals))[0], 1)
            self.store("shared", idx[w], da[w], e, [v[w] for v in vals], ins)
            if rest.any():
                w = np.flatnonzero(rest)
                q.append([idx[w], gid[w], da[w], e, [v[w] for v in vals], ins])
        self.cpq = q

    def atomic(self, sp, idx, addr, n, b, c, comb, ins):
        out = np.empty(addr.size, UDT[n])
        for w, buf, off, space in self._place(sp, idx, addr, n, ins, "atomic"):
            lanes = idx if w is None else idx[w]
            bb = b if w is None else b[w]
            cc = None if c is None else (c if w is None else c[w])
            view = buf.v[n]
            e = (off // u64(n)).astype(np.int64)
            if space == "global":
                self.g["atomics"] += off.size
                if self.race_global:
                    self._g_shadow(buf)[0][self._g_cells(lanes, off, n)[0]] = -2
                buf.mark("rd", off, n)
                buf.mark("wr", off, n)
            elif space == "shared":
                self.s["atomics"] += off.size
                self._sh_atomic(lanes, off, n, ins)
            order = np.arange(e.size) if self.atom_order == "lane" else self.rng.permutation(e.size)
            o = order[np.argsort(e[order], kind="stable")]
            es = e[o]
            new = np.r_[True, es[1:] != es[:-1]]
            st = np.flatnonzero(new)
            rank = np.arange(es.size) - np.repeat(st, np.diff(np.r_[st, es.size]))
            old = np.empty(e.size, UDT[n])
            mr = int(rank.max())
            if mr == 0:
                v = view[e]
                view[e] = comb(v, bb, cc)
                old[:] = v
            else:
                for r in range(mr + 1):
                    k = o[rank == r] if mr < 64 else o[st[np.diff(np.r_[st, es.size]) > r] + r]
                    v = view[e[k]]
                    view[e[k]] = comb(v, bb[k], None if cc is None else cc[k])
                    old[k] = v
            if w is None:
                return old
            out[w] = old
        return out
