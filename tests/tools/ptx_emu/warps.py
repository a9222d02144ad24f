"""Blocks and warps: who waits where, and barriers."""

from __future__ import annotations

import numpy as np

from .errors import BarrierError
from .integers import bits32
from .syntax import K_WARP
from .types import i32, u32

RUN, BARW, WARPW, DONE = 0, 1, 2, 3


class Warps:
    """Blocks and warps: who waits where, and barriers."""

    def who(self, lane):
        b = self.b0 + int(self.blk[lane])
        t = int(self.tid[lane])
        bx, by, _ = self.block
        gx, gy, _ = self.grid
        place = f"block ({b % gx},{b // gx % gy},{b // gx // gy})"
        return f"{place} thread ({t % bx},{t // bx % by},{t // bx // by})"

    def first(self, m):
        return 0 if m is None else int(np.flatnonzero(m)[0])

    def warn(self, msg, n=1):
        self.warnings[msg] = self.warnings.get(msg, 0) + int(n)

    def group(self, m, ins):
        """Participating lanes of a warp-level instruction: (rows, 32) bool, spread(result),
        rows(values). One row a warp where the membermask is uniform in it, else one row a lane."""
        act = (np.ones(self.T, bool) if m is None else m).reshape(-1, 32)

        def rep(r):
            return np.repeat(r, 32, axis=0)

        def one(v):
            return np.broadcast_to(np.asarray(v), self.T).reshape(-1, 32)

        if ins.kind != K_WARP or ins.aux is None:
            return act, rep, one
        mm = np.asarray(ins.aux(self))
        if mm.ndim == 0:
            return act & ((int(mm) >> np.arange(32)) & 1).astype(bool), rep, one
        a = np.where(act, mm.reshape(-1, 32), u32(0))
        top = a.max(1)
        if ((a == top[:, None]) | ~act).all():
            return (
                act & ((top[:, None] >> np.arange(32, dtype=u32)) & u32(1)).astype(bool),
                rep,
                one,
            )
        G = act[:, None, :] & ((a[:, :, None] >> np.arange(32, dtype=u32)) & u32(1)).astype(bool)
        return G.reshape(-1, 32), (lambda r: r), (lambda v: np.repeat(one(v), 32, axis=0))

    def _warp_ready(self, ins, pm, cur):
        mm = np.asarray(ins.aux(self))
        if pm is None:
            if (mm == u32(0xFFFFFFFF)).all():
                return True
            pm = np.ones(self.T, bool)
        act = pm.reshape(-1, 32)
        live = (self.state != DONE).reshape(-1, 32)
        if mm.ndim == 0:
            need = ((int(mm) >> np.arange(32)) & 1).astype(bool)[None, :] & act.any(1)[:, None]
            if (act & ~((int(mm) >> np.arange(32)) & 1).astype(bool)[None, :]).any():
                raise BarrierError(
                    f"a lane executes {ins!r} but is not in its membermask: "
                    f"{self.who(self.first(pm))}"
                )
        else:
            q = np.where(act, mm.reshape(-1, 32), u32(0))
            own = (q >> np.arange(32, dtype=u32)[None, :]) & u32(1)
            if (act & (own == 0)).any():
                lane = int(np.flatnonzero((act & (own == 0)).reshape(-1))[0])
                raise BarrierError(
                    f"a lane executes {ins!r} but is not in its membermask: {self.who(lane)}"
                )
            orm = np.bitwise_or.reduce(q, axis=1)
            need = ((orm[:, None] >> np.arange(32, dtype=u32)[None, :]) & u32(1)).astype(bool)
        return not (need & live & ~act).any()

    def _warp_split(self, ins, pm, cur):
        """The lanes pm are at the warp-synchronous instruction cur: execute the warps that are
        complete; others wait."""
        T = self.T
        pmf = np.ones(T, bool) if pm is None else pm
        cand = pmf | ((self.state == WARPW) & (self.pc == cur))
        act = cand.reshape(-1, 32)
        live = (self.state != DONE).reshape(-1, 32)
        mm = np.broadcast_to(np.asarray(ins.aux(self)), T).reshape(-1, 32)
        q = np.where(act, mm, u32(0))
        # a lane may go when all live lanes named by its own mask are candidates
        missing = live & ~act
        miss = bits32(missing)
        ok = act & ((q & miss[:, None]) == 0)
        ok = ok.reshape(-1)
        wait = cand & ~ok
        self.state[wait] = WARPW
        self.pc[wait] = cur
        if ok.any():
            self.state[ok] = RUN
            ins.fn(self, ok)
            self.pc[ok] = cur + 1

    def warp_sync(self, m):
        w = np.arange(self.T // 32) if m is None else np.flatnonzero(m.reshape(-1, 32).any(1))
        self.wep[w] += 1

    def _release(self, blocks, ins):
        self.epoch[blocks] += 1
        self.barriers += len(blocks)
        if (self.state == DONE)[self.real].any():
            dead = ((self.state == DONE) & self.real).reshape(self.nb, -1)[blocks].any(1)
            if dead.any():
                if self.strict:
                    raise BarrierError(
                        f"barrier divergence: threads had exited before the barrier {ins!r} "
                        "(strict_barrier=False to allow)"
                    )
                self.warn(f"threads had exited before the barrier {ins!r}", int(dead.sum()))

    def _barrier(self, ins, pm, cur):
        T = self.T
        pmf = np.ones(T, bool) if pm is None else pm
        kind = ins.aux[0]
        bid = np.broadcast_to(np.asarray(ins.aux[1](self)), T).astype(i32)
        cnt = (
            None
            if ins.aux[2] is None
            else np.broadcast_to(np.asarray(ins.aux[2](self)), T).astype(np.int64)
        )
        if kind == "arrive":
            for lane in np.flatnonzero(pmf):
                k = (int(self.blk[lane]), int(bid[lane]))
                self.arrived[k] = self.arrived.get(k, 0) + 1
        else:
            self.state[pmf] = BARW
            self.pc[pmf] = cur
            self.barid[pmf] = bid[pmf]
        live = self.state != DONE
        for b in np.unique(self.blk[pmf]):
            sl = slice(b * self.lpb, (b + 1) * self.lpb)
            wt, lv = self.state[sl] == BARW, live[sl]
            if cnt is not None:
                for i in np.unique(bid[sl][pmf[sl]]):
                    w = wt & (self.barid[sl] == i)
                    need = int(cnt[sl][pmf[sl] & (bid[sl] == i)][0])
                    have = int(w.sum()) + self.arrived.get((int(b), int(i)), 0)
                    if have >= need:
                        self.arrived.pop((int(b), int(i)), None)
                        self._free(b, sl, w)
                continue
            if (wt == lv).all():
                self._free(b, sl, wt)

    def _free(self, b, sl, w):
        pcs = np.unique(self.pc[sl][w])
        ids = np.unique(self.barid[sl][w])
        if len(ids) > 1:
            raise BarrierError(
                f"barrier divergence in block {self.b0 + b}: threads wait at different barriers: "
                + "; ".join(
                    f"{int((self.pc[sl][w] == q).sum())} threads at {self.prog.code[q]!r}"
                    for q in pcs
                )
            )
        if len(pcs) > 1 and self.strict:
            raise BarrierError(
                f"barrier divergence in block {self.b0 + b}: "
                + "; ".join(
                    f"{int((self.pc[sl][w] == q).sum())} threads at {self.prog.code[q]!r}"
                    for q in pcs
                )
            )
        for q in pcs:
            ins = self.prog.code[q]
            if ins.aux[0] == "red":
                _, _, _, rop, dst, pr = ins.aux
                full = np.zeros(self.T, bool)
                full[sl] = w
                p = np.broadcast_to(np.asarray(pr(self)), self.T)[full]
                v = (
                    u32(p.sum())
                    if rop == "popc"
                    else np.bool_(p.all() if rop == "and" else p.any())
                )
                dst(self, full, v)
        self.pc[sl][w] += 1
        self.state[sl][w] = RUN
        self._release(np.array([b]), self.prog.code[pcs[0]])

    def _blocked(self):
        """Nothing can run: an exit may have completed a barrier or a warp-level instruction;
        otherwise it is a deadlock."""
        done = False
        for q in np.unique(self.pc[self.state == WARPW]):
            before = self.state.copy()
            w = (self.state == WARPW) & (self.pc == q)
            self._warp_split(self.prog.code[q], w, int(q))
            done |= bool((before != self.state).any())
        for b in range(self.nb):
            sl = slice(b * self.lpb, (b + 1) * self.lpb)
            st = self.state[sl]
            wt = st == BARW
            if (
                wt.any()
                and (wt == (st != DONE)).all()
                and all(self.prog.code[q].aux[2] is None for q in np.unique(self.pc[sl][wt]))
            ):
                self._free(b, sl, wt)
                done = True
        if not done:
            w = np.flatnonzero(self.state != DONE)
            pcs = np.unique(self.pc[w])
            raise BarrierError(
                "deadlock: no thread can run: "
                + "; ".join(
                    f"{int((self.pc[w] == q).sum())} threads "
                    f"(first {self.who(int(w[self.pc[w] == q][0]))}) "
                    f"wait at {self.prog.code[q]!r}"
                    for q in pcs
                )
            )
