"""Races in shared memory within a barrier interval."""

from __future__ import annotations

import numpy as np

from .errors import RaceError, UninitializedRead
from .types import UDT, i32, u64


class SharedRaces:
    """Races in shared memory within a barrier interval. Granules are as large as the smallest
    shared access of the kernel."""

    def _gran(self, off, size):
        g = self.gr
        k = size // g
        if k <= 1:
            return (off // u64(g)).astype(np.int64), 1
        return ((off // u64(g)).astype(np.int64)[:, None] + np.arange(k)).reshape(-1), k

    def _report(self, kind, cells, a, b, ins):
        S = self.S
        for c, t1, t2 in list(zip(cells, a, b, strict=False))[:4]:
            byte = int(c) * self.gr
            msg = (
                f"{kind} in shared memory at byte {byte % S}: "
                + (self.who(int(t1)) if t1 >= 0 else "another thread")
                + f" and {self.who(int(t2))}, no barrier between, at {ins!r}"
            )
            if self.race == "raise":
                raise RaceError(msg)
            if len(self.races) < 100:
                self.races.append(msg)

    def _uninitialized(self, lanes, ins):
        """Lanes that read shared memory which no thread has written: one entry for each granule."""
        self.s["uninit_reads"] += len(lanes)
        if self.uninitialized == "raise":
            raise UninitializedRead(
                f"read of shared memory that no thread has written, by {self.who(int(lanes[0]))} "
                f"at {ins!r}"
            )

    def _sh_read(self, lanes, off, size, ins):
        if not self.race:
            return
        cell, k = self._gran(off, size)
        t = np.repeat(lanes, k).astype(i32)
        un = ~self.sh_init[cell * self.gr]
        if un.any():
            self._uninitialized(np.repeat(lanes, k)[un], ins)
        if self.cpq and self.pend[cell].any():
            j = np.flatnonzero(self.pend[cell])
            self._report(
                "read of a cp.async destination before its wait",
                cell[j],
                np.full(j.size, -1),
                t[j],
                ins,
            )
        ep, we, wp = self.epoch[self.blk[t]], self.wep[t >> 5], t >> 5
        # read after another thread's write
        wt = self.w_t[cell]
        cand = (self.w_e[cell] == ep) & ((wt != t) | self.w_at[cell])
        if cand.any():
            same = (wt >> 5) == wp
            cand &= ~same | (self.w_we[cell] == we)
            if self.race_mode == "value":
                cand &= self.w_chg[cell]
            if cand.any():
                j = np.flatnonzero(cand)
                self._report("read-after-write race", cell[j], wt[j], t[j], ins)
        self._note_read(cell, t, ep, we, wp)

    def _note_read(self, cell, t, ep, we, wp):
        rt = self.r_t[cell]
        cur = self.r_e[cell] == ep
        diff_w = cur & ((rt >> 5) != wp)
        diff_t = cur & (rt != t) & ((rt >> 5) == wp) & (self.r_we[cell] == we)
        stale = ~cur
        self.r_mw[cell[stale]] = False
        self.r_mt[cell[stale | (self.r_we[cell] != we)]] = False
        self.r_mw[cell[diff_w]] = True
        self.r_mt[cell[diff_t]] = True
        self.r_t[cell] = t
        self.r_e[cell] = ep
        self.r_we[cell] = we
        # several readers within this very instruction: compare with what was finally noted
        last = self.r_t[cell]
        d = last != t
        if d.any():
            self.r_mt[cell[d & ((last >> 5) == wp)]] = True
            self.r_mw[cell[d & ((last >> 5) != wp)]] = True

    def _sh_write(self, lanes, off, n, vals, ins):
        nv = len(vals)
        size = n * nv
        for k in range(nv):
            o = off + u64(k * n)
            self.sh_init.view(UDT[n])[(o // u64(n)).astype(np.int64)] = {
                1: 1,
                2: 0x0101,
                4: 0x01010101,
                8: 0x0101010101010101,
            }[n]
        if not self.race:
            return
        g = self.gr
        raw = np.stack(vals, 1)  # (N, nv)
        raw = np.ascontiguousarray(raw).view(UDT[g]).reshape(-1)  # one value per granule
        cell, k = self._gran(off, size)
        t = np.repeat(lanes, k).astype(i32)
        old = self.smem.v[g][cell]
        diff = raw != old
        flag = diff if self.race_mode == "value" else np.ones(diff.shape, bool)
        ep, we, wp = self.epoch[self.blk[t]], self.wep[t >> 5], t >> 5
        wt = self.w_t[cell]
        cand = (self.w_e[cell] == ep) & ((wt != t) | self.w_at[cell]) & flag
        if cand.any():
            cand &= ((wt >> 5) != wp) | (self.w_we[cell] == we)
            if cand.any():
                j = np.flatnonzero(cand)
                self._report("write-after-write race", cell[j], wt[j], t[j], ins)
        rt = self.r_t[cell]
        cur = (self.r_e[cell] == ep) & flag
        if cur.any():
            same = (rt >> 5) == wp
            cand = cur & (
                self.r_mw[cell]
                | ~same
                | (same & (self.r_we[cell] == we) & ((rt != t) | self.r_mt[cell]))
            )
            if cand.any():
                j = np.flatnonzero(cand)
                self._report(
                    "write-after-read race", cell[j], np.where(rt[j] != t[j], rt[j], -1), t[j], ins
                )
        # two lanes of this instruction writing one cell
        self.w_t[cell] = t
        last = self.w_t[cell] != t
        if last.any():
            np.empty(self.w_t.size, UDT[g]) if False else None
            o = np.argsort(cell, kind="stable")
            cs, rs = cell[o], raw[o]
            dup = (cs[1:] == cs[:-1]) & ((rs[1:] != rs[:-1]) if self.race_mode == "value" else True)
            if dup.any():
                j = np.flatnonzero(dup)
                self._report("write-write race (one instruction)", cs[j], t[o][j], t[o][j + 1], ins)
        keep = self.w_e[cell] == ep
        self.w_chg[cell] = diff | (keep & self.w_chg[cell])
        self.w_e[cell] = ep
        self.w_we[cell] = we
        self.w_at[cell] = False

    def _sh_atomic(self, lanes, off, n, ins):
        un = ~self.sh_init[off.astype(np.int64)]
        if un.any():
            self._uninitialized(lanes[un], ins)
        self.sh_init.view(UDT[n])[(off // u64(n)).astype(np.int64)] = {
            1: 1,
            2: 0x0101,
            4: 0x01010101,
            8: 0x0101010101010101,
        }[n]
        if not self.race:
            return
        cell, k = self._gran(off, n)
        t = np.repeat(lanes, k).astype(i32)
        ep, we, wp = self.epoch[self.blk[t]], self.wep[t >> 5], t >> 5
        wt = self.w_t[cell]
        cand = (self.w_e[cell] == ep) & (wt != t) & ~self.w_at[cell]
        cand &= ((wt >> 5) != wp) | (self.w_we[cell] == we)
        if cand.any():
            j = np.flatnonzero(cand)
            self._report("atomic after plain write", cell[j], wt[j], t[j], ins)
        rt = self.r_t[cell]
        same = (rt >> 5) == wp
        cand = (self.r_e[cell] == ep) & (
            self.r_mw[cell]
            | ~same
            | (same & (self.r_we[cell] == we) & ((rt != t) | self.r_mt[cell]))
        )
        if cand.any():
            j = np.flatnonzero(cand)
            self._report(
                "atomic after plain read", cell[j], np.where(rt[j] != t[j], rt[j], -1), t[j], ins
            )
        self.w_t[cell] = t
        self.w_e[cell] = ep
        self.w_we[cell] = we
        self.w_chg[cell] = True
        self.w_at[cell] = True
