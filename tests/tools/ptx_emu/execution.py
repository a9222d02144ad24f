"""The main loop: chooses the threads that run next, and runs instructions."""

from __future__ import annotations

import numpy as np

from .errors import StepLimit
from .syntax import K_BAR, K_BRA, K_BRX, K_EXIT, K_RUN, K_WARP
from .types import BIG
from .warps import DONE, RUN


def _put(values, mask, value):
    """Set the values of the threads in a mask; None: of all threads."""
    if mask is None:
        values[:] = value
    else:
        values[mask] = value


class Execution:
    """The main loop: chooses the threads that run next, and runs instructions."""

    def _run(self):
        code, V, T = self.prog.code, self.V, self.T
        pc, state = self.pc, self.state
        nsched = 0
        curwarp = None
        while True:
            runnable = state == RUN
            if not runnable.any():
                if (state == DONE).all():
                    return
                self._blocked()
                continue
            nsched += 1
            if self.schedule == "warp":
                ws = np.flatnonzero(runnable.reshape(-1, 32).any(1))
                if curwarp not in ws:
                    curwarp = self.rng.choice(ws)
                sel = np.zeros(T, bool)
                sel[curwarp * 32 : curwarp * 32 + 32] = True
                runnable = runnable & sel
            eff = np.where(runnable, pc, BIG)
            cur = int(eff.min())
            if nsched > 20000 and nsched % 16 == 0:  # fairness, for spin loops
                cur = int(self.rng.choice(np.unique(eff[runnable])))
            m = eff == cur
            nact = int(np.count_nonzero(m))
            if nact == T:
                m, nxt, nwarp = None, BIG, T // 32
            else:
                rest = eff[~m & (eff > cur)]
                nxt = int(rest.min()) if rest.size else BIG
                low = eff[eff < cur]
                if low.size:
                    nxt = min(nxt, cur + 200)
                nwarp = int(np.count_nonzero(m.reshape(-1, 32).any(1)))
            start = cur
            back = 0
            while True:
                if cur >= nxt:
                    self._count(start, cur, nact, nwarp)
                    _put(pc, m, cur)
                    break
                ins = code[cur]
                k = ins.kind
                if self.trace:
                    print(f"{cur} [{nact}] {ins.text}", file=self.trace)
                if ins.pslot is None:
                    pm, np_ = m, nact
                else:
                    pm = V[ins.pslot]
                    pm = ~pm if ins.neg else pm.copy()
                    if m is not None:
                        pm &= m
                    np_ = int(np.count_nonzero(pm))
                    if np_ == T:
                        pm = None
                if k == K_RUN:
                    if np_:
                        ins.fn(self, pm)
                    cur += 1
                    continue
                self._count(start, cur + 1, nact, nwarp)
                if k == K_BRA:
                    if np_ == nact:
                        if ins.target <= cur:
                            back += 1
                            if (
                                back > 5000 and nact < T
                            ):  # maybe spinning on what other threads must do
                                nsched = max(nsched, 20000)
                                pc[m] = ins.target
                                break
                        cur = start = ins.target
                        continue
                    if np_ == 0:
                        cur += 1
                        start = cur
                        continue
                    _put(pc, m, cur + 1)
                    pc[pm] = ins.target
                    break
                if np_ == 0:
                    cur += 1
                    start = cur
                    continue
                if k == K_EXIT:
                    _put(pc, m, cur + 1)
                    _put(state, pm, DONE)
                    break
                if k == K_WARP:
                    if self._warp_ready(ins, pm, cur):
                        ins.fn(self, pm)
                        cur += 1
                        start = cur
                        continue
                    # some lanes of some warps have not arrived
                    _put(pc, m, cur + 1)
                    self._warp_split(ins, pm, cur)
                    break
                if k == K_BAR:
                    live = int(np.count_nonzero(state != DONE))
                    if np_ == live and np_ == nact and ins.aux[0] == "sync" and ins.aux[2] is None:
                        b = np.asarray(ins.aux[1](self))
                        if b.ndim == 0:
                            self._release(
                                np.arange(self.nb)
                                if live == T
                                else np.unique(self.blk[state != DONE]),
                                ins,
                            )
                            cur += 1
                            start = cur
                            continue
                    _put(pc, m, cur + 1)
                    self._barrier(ins, pm, cur)
                    break
                if k == K_BRX:
                    i = np.broadcast_to(np.asarray(ins.aux(self)), T).astype(np.int64)
                    i = np.clip(i, 0, len(ins.target) - 1)
                    _put(pc, m, cur + 1)
                    tgt = ins.target[i]
                    if pm is None:
                        pc[:] = tgt
                    else:
                        pc[pm] = tgt[pm]
                    break

    def _count(self, a, b, nact, nwarp):
        if b > a:
            self.cnt_t[a:b] += nact
            self.cnt_w[a:b] += nwarp
            self.steps += b - a
            if self.steps > self.max_steps:
                raise StepLimit(
                    f"{self.steps} group steps executed (max_steps); "
                    f"endless loop near {self.prog.code[b - 1]!r}?"
                )
