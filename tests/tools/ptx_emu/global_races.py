"""Unordered accesses to global memory: recorded, not raised, since fences and flags are not
understood."""

from __future__ import annotations

import numpy as np

from .errors import RaceError
from .types import UDT, i32, i64, u64


class GlobalRaces:
    """Unordered accesses to global memory: recorded, not raised, since fences and flags are not
    understood."""

    def _g_shadow(self, buf):
        sh = getattr(buf, "sh", None)
        if sh is None or sh[6] is not self:
            n = buf.n // self.prog.min_gl + 1
            sh = buf.sh = (
                np.full(n, -1, i64),
                np.zeros(n, i32),
                np.zeros(n, i32),
                np.full(n, -1, i64),
                np.zeros(n, i32),
                np.zeros(n, i32),
                self,
            )
        return sh

    def _g_cells(self, lanes, off, size):
        g = self.prog.min_gl
        k = max(1, size // g)
        c = (off // u64(g)).astype(np.int64)
        if k > 1:
            c = (c[:, None] + np.arange(k)).reshape(-1)
            lanes = np.repeat(lanes, k)
        return c, lanes, lanes + self.b0 * self.lpb

    def _g_unordered(self, ot, oe, owe, t, lanes):
        """Whether the access of thread ot (barrier interval oe, warp interval owe) is unordered
        with that of thread t now."""
        diff = (ot >= 0) & (ot != t)
        if not diff.any():
            return diff
        blk = ot // self.lpb != t // self.lpb
        same_e = oe == self.epoch[self.blk[lanes]]
        same_w = (ot >> 5 == t >> 5) & (owe != self.wep[lanes >> 5])
        return diff & (blk | (same_e & ~same_w))

    def _g_report(self, kind, buf, c, t1, lane, ins):
        other = f"block {int(t1) // self.lpb} thread {int(t1) % self.lpb}"
        msg = (
            f"{kind} at byte {int(c) * self.prog.min_gl} of {buf.name}: {other} and "
            f"{self.who(int(lane))} at {ins!r}"
        )
        if self.race_global == "raise":
            raise RaceError("global memory, " + msg)
        if len(self.graces) < 100:
            self.graces.append(msg)

    def _g_read(self, buf, lanes, off, size, ins):
        wt, we, ww, rt, re_, rw, _ = self._g_shadow(buf)
        c, lanes, t = self._g_cells(lanes, off, size)
        bad = self._g_unordered(wt[c], we[c], ww[c], t, lanes)
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            self._g_report(
                "read of another thread's unordered write", buf, c[j], wt[c[j]], lanes[j], ins
            )
        rt[c] = t
        re_[c] = self.epoch[self.blk[lanes]]
        rw[c] = self.wep[lanes >> 5]

    def _g_write(self, buf, lanes, off, n, vals, ins):
        wt, we, ww, rt, re_, rw, _ = self._g_shadow(buf)
        g = self.prog.min_gl
        c, lanes, t = self._g_cells(lanes, off, n * len(vals))
        raw = np.ascontiguousarray(np.stack(vals, 1)).view(UDT[g]).reshape(-1)
        chg = raw != buf.v[g][c]
        bad = chg & self._g_unordered(wt[c], we[c], ww[c], t, lanes)
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            self._g_report(
                "two unordered writes of different values", buf, c[j], wt[c[j]], lanes[j], ins
            )
        bad = chg & self._g_unordered(rt[c], re_[c], rw[c], t, lanes)
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            self._g_report(
                "write of what another thread read, unordered", buf, c[j], rt[c[j]], lanes[j], ins
            )
        wt[c] = t
        we[c] = self.epoch[self.blk[lanes]]
        ww[c] = self.wep[lanes >> 5]
        if (wt[c] != t).any():
            o = np.argsort(c, kind="stable")
            d = (c[o][1:] == c[o][:-1]) & (raw[o][1:] != raw[o][:-1])
            if d.any():
                j = int(np.flatnonzero(d)[0])
                self._g_report(
                    "one instruction writes different values",
                    buf,
                    c[o][j],
                    t[o][j],
                    lanes[o][j + 1],
                    ins,
                )
