"""A launch: runs the threads of a grid, in batches of blocks."""

from __future__ import annotations

import time

import numpy as np

from .arguments import Arguments
from .buffers import Buffer
from .errors import PTXError
from .execution import Execution
from .global_races import GlobalRaces
from .memory_access import MemoryAccess
from .shared_races import SharedRaces
from .special_registers import SpecialRegisters
from .stats import Stats, op_class
from .types import UDT, i8, i32, i64, u8
from .warps import DONE, RUN, Warps


class Launch(
    Arguments,
    Execution,
    Warps,
    SpecialRegisters,
    MemoryAccess,
    SharedRaces,
    GlobalRaces,
):
    def __init__(
        self,
        mod,
        prog,
        grid,
        block,
        args,
        shared_bytes,
        race="raise",
        race_mode="value",
        strict_barrier=True,
        approx_ulp=0.0,
        seed=0,
        max_lanes=8192,
        max_steps=20_000_000,
        schedule="lockstep",
        atom_order="lane",
        shared_limit=232448,
        bank=False,
        poison=0xFF,
        trace=None,
        cp_async="deferred",
        race_global="record",
        uninitialized="count",
    ):
        """race: "raise", "record" or None. race_mode: "value" (only when the values differ) or
        "strict". approx_ulp: 0 rounds approximate functions exactly, k adds a random relative error
        of k times the documented ulps. schedule: "lockstep" (all warps together, lowest program
        counter first) or "warp" (one random warp at a time, to expose races). atom_order: "lane" or
        "random". bank: count shared-memory wavefronts. trace: a file that gets each executed
        instruction. uninitialized: reads of shared memory that no thread has written, "count" or
        "raise"."""

        def tup(v):
            return tuple(int(k) for k in (v if hasattr(v, "__len__") else (v,))) + (1,) * (
                3 - (len(v) if hasattr(v, "__len__") else 1)
            )

        self.mod, self.prog, self.grid, self.block = mod, prog, tup(grid), tup(block)
        self.race, self.race_mode, self.strict = race, race_mode, strict_barrier
        self.approx_ulp, self.rng = approx_ulp, np.random.default_rng(seed)
        self.max_steps, self.schedule, self.atom_order, self.bank, self.poison, self.trace = (
            max_steps,
            schedule,
            atom_order,
            bank,
            poison,
            trace,
        )
        bx, by, bz = self.block
        self.tpb = bx * by * bz
        if not 1 <= self.tpb <= 1024:
            raise PTXError(f"block of {self.tpb} threads")
        if prog.reqntid:
            r = tuple(prog.reqntid) + (1,) * (3 - len(prog.reqntid))
            if r != self.block:
                raise PTXError(f"kernel requires block {r} (.reqntid), got {self.block}")
        if prog.maxntid and self.tpb > np.prod(prog.maxntid):
            raise PTXError(f"block of {self.tpb} threads exceeds .maxntid {prog.maxntid}")
        self.lpb = -(-self.tpb // 32) * 32
        self.dyn = int(shared_bytes)
        self.smem_size = (
            prog.dyn_base + self.dyn
            if (self.dyn or any(v.extern or v.size == 0 for v in prog.shared_vars))
            else prog.static_shared
        )
        if self.smem_size > shared_limit:
            raise PTXError(f"shared memory {self.smem_size} B exceeds the limit {shared_limit}")
        self.cp_sync = cp_async == "sync"
        self.race_global = race_global
        self.uninitialized = uninitialized
        self.max_lanes = max_lanes
        self.bufs = dict(mod.mbufs)
        for b in self.bufs.values():
            b.rd = b.wr = None
        self.arg_bufs = []
        self._bind(args)
        self.cnt_t = np.zeros(len(prog.code), np.int64)
        self.cnt_w = np.zeros(len(prog.code), np.int64)
        self.warnings, self.races, self.graces = {}, [], []
        self.steps = 0
        self.g = {
            "bytes_read": 0,
            "bytes_written": 0,
            "loads": 0,
            "stores": 0,
            "sectors_read": 0,
            "sectors_written": 0,
            "atomics": 0,
        }
        self.s = {
            "size": self.smem_size,
            "loads": 0,
            "stores": 0,
            "bytes_read": 0,
            "bytes_written": 0,
            "uninit_reads": 0,
            "atomics": 0,
            "wavefronts": 0,
        }
        self.local_bytes = 0
        self.barriers = 0

    def go(self):

        t0 = time.time()
        nb = int(np.prod(self.grid))
        if nb < 1:
            raise PTXError("empty grid")
        regbytes = sum(max(r.size, 1) for r in self.prog.regs) or 1
        lanes = min(self.max_lanes, max(self.lpb, int(1e9) // regbytes))
        per = max(1, lanes // self.lpb)
        if self.schedule == "warp":
            per = 1
        with np.errstate(all="ignore"):
            for b0 in range(0, nb, per):
                self._batch(b0, min(per, nb - b0))
        return self._stats(time.time() - t0)

    def _batch(self, b0, nb):
        p = self.prog
        T = self.T = nb * self.lpb
        self.nb, self.b0 = nb, b0
        self.R = []
        for r in p.regs:
            if r.type == "pred":
                self.R.append(np.zeros(T, bool))
            else:
                self.R.append(np.full(T, (1 << 8 * r.size) - 1, UDT[r.size]))  # poison: NaN / -1
        self.V = [self.R[i] if dt == np.bool_ else self.R[i].view(dt) for i, dt in p.slots]
        lanes = np.arange(T)
        self.tid = lanes % self.lpb
        self.blk = lanes // self.lpb
        self.lane = (self.tid % 32).astype(i64)
        self.wbase = (lanes - lanes % 32).astype(i64)
        self.warp = lanes // 32
        self.sr = {}
        self.cc = np.zeros(T, bool)
        S = self.S = max(16, -(-self.smem_size // 16) * 16)
        self.smem = Buffer(np.full(nb * S, self.poison, u8), 0, "shared")
        L = self.L = p.local_size
        self.lmem = Buffer(np.full(T * L, self.poison, u8), 0, "local") if L else None
        self.sh_init = np.zeros(nb * S, bool)
        self.epoch = np.zeros(nb, i32)  # block barrier interval
        self.wep = np.zeros(T // 32, i32)  # warp sync interval
        if self.race:
            g = self.gr = p.min_sh
            n = nb * S // g
            self.w_t = np.full(n, -1, i32)
            self.w_e = np.full(n, -1, i32)
            self.w_we = np.zeros(n, i32)
            self.w_chg = np.zeros(n, bool)
            self.w_at = np.zeros(n, bool)
            self.r_t = np.full(n, -1, i32)
            self.r_e = np.full(n, -1, i32)
            self.r_we = np.zeros(n, i32)
            self.r_mt = np.zeros(n, bool)
            self.r_mw = np.zeros(n, bool)
            self.pend = np.zeros(n, i32)
        self.cpq, self.cpg = [], np.zeros(T, i32)
        self.pc = np.zeros(T, i32)
        self.state = np.where(self.tid < self.tpb, RUN, DONE).astype(i8)
        self.real = self.tid < self.tpb
        self.barid = np.full(T, -1, i32)
        self.arrived = {}
        self._run()

    def _stats(self, sec):
        it, iw, cl = {}, {}, {}
        for k, ins in enumerate(self.prog.code):
            c = int(self.cnt_t[k])
            if c:
                it[ins.op] = it.get(ins.op, 0) + c
                iw[ins.op] = iw.get(ins.op, 0) + int(self.cnt_w[k])
                q = op_class(ins.op)
                cl[q] = cl.get(q, 0) + int(self.cnt_w[k])
        g = dict(self.g)
        g["unique_read"] = sum(b.unique("rd") for b in self.bufs.values())
        g["unique_written"] = sum(b.unique("wr") for b in self.bufs.values())
        pr = [
            {
                "arg": k,
                "name": self.prog.params[k].name,
                "nbytes": b.n,
                "unique_read": b.unique("rd"),
                "unique_written": b.unique("wr"),
            }
            for k, b, _ in self.arg_bufs
        ]
        return Stats(
            kernel=self.prog.name,
            grid=self.grid,
            block=self.block,
            seconds=sec,
            inst_thread=it,
            inst_warp=iw,
            by_class=dict(sorted(cl.items(), key=lambda e: -e[1])),
            thread_instructions=int(self.cnt_t.sum()),
            warp_instructions=int(self.cnt_w.sum()),
            **{"global": g},
            shared=dict(self.s),
            local_bytes=self.local_bytes,
            barriers=self.barriers,
            params=pr,
            warnings=dict(self.warnings),
            races=list(self.races),
            global_races=list(self.graces),
            group_steps=self.steps,
        )
