"""Special registers, and the errors of approximate instructions."""

from __future__ import annotations

import re

import numpy as np

from .errors import UnknownInstruction
from .types import f32


class SpecialRegisters:
    """Special registers, and the errors of approximate instructions."""

    def sreg(self, name):
        v = self.sr.get(name)
        if v is not None:
            return v
        parts = name.split(".")
        base, ax = parts[0], {"x": 0, "y": 1, "z": 2}.get(parts[1] if len(parts) > 1 else "x", 3)
        bx, by, bz = self.block
        gx, gy, gz = self.grid
        b = self.b0 + self.blk
        if base == "%tid":
            v = [self.tid % bx, self.tid // bx % by, self.tid // (bx * by), self.tid * 0][ax]
        elif base in ("%ctaid", "%clusterid"):
            v = [b % gx, b // gx % gy, b // (gx * gy), b * 0][ax]
        elif base == "%ntid":
            v = np.asarray((bx, by, bz, 1)[ax])
        elif base in ("%nctaid", "%nclusterid"):
            v = np.asarray((gx, gy, gz, 1)[ax])
        elif base == "%laneid":
            v = self.lane
        elif base == "%warpid":
            v = self.tid // 32
        elif base == "%nwarpid":
            v = np.asarray(self.lpb // 32)
        elif base == "WARP_SZ":
            v = np.asarray(32)
        elif base.startswith("%lanemask_"):
            one = np.left_shift(1, self.lane)
            k = base[10:]
            v = {
                "eq": one,
                "lt": one - 1,
                "le": 2 * one - 1,
                "ge": 0xFFFFFFFF & ~(one - 1),
                "gt": 0xFFFFFFFF & ~(2 * one - 1),
            }[k]
        elif base.startswith(("%clock", "%globaltimer")):
            return np.asarray(self.steps)
        elif base == "%dynamic_smem_size":
            v = np.asarray(self.dyn)
        elif base in ("%total_smem_size", "%aggr_smem_size"):
            v = np.asarray(self.smem_size)
        elif base in ("%cluster_nctarank", "%cluster_nctaid", "%nsmid"):
            v = np.asarray(1)
        elif base in (
            "%smid",
            "%gridid",
            "%cluster_ctarank",
            "%cluster_ctaid",
            "%is_explicit_cluster",
            "%current_graph_exec",
        ) or re.match(r"%(envreg|pm)", base):
            v = np.asarray(0)
        else:
            raise UnknownInstruction("special register " + name)
        self.sr[name] = v = np.asarray(v)
        return v

    def ap(self, v, ulps, floor=0.0):
        """Result of an approximate instruction: rounded exactly, or with a random error of the
        documented size (ulps * 2**-23 relative; the error is absolute below |v| = floor)."""
        r = v.astype(f32)
        if self.approx_ulp:
            n = self.rng.uniform(-1, 1, np.shape(v)) * (ulps * self.approx_ulp * 2.0**-23)
            r = np.where(
                np.isfinite(r) & (r != 0), (v + n * np.maximum(np.abs(v), floor)).astype(f32), r
            )
        return r
