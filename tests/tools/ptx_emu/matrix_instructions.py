"""ldmatrix, stmatrix and mma."""

from __future__ import annotations

import re

import numpy as np

from .errors import UnknownInstruction
from .floats import bf2f
from .syntax import K_WARP
from .types import SIZE, f16, f32, f64, u16, u32


class MatrixInstructions:
    """Matrix instructions: ldmatrix, stmatrix and mma."""

    # tensor-core mma and ldmatrix (fragments of the PTX ISA, f16/bf16/tf32 inputs)
    def c_ldmatrix(self, ins):
        P = ins.parts
        num = {"x1": 1, "x2": 2, "x4": 4}[next(p for p in P if p in ("x1", "x2", "x4"))]
        if "m8n8" not in P or P[-1] != "b16":
            raise UnknownInstruction(ins.op)
        tr = "trans" in P
        ds = ins.ops[0][1] if ins.ops[0][0] == "v" else [ins.ops[0]]
        puts = [self.dst(o, "b32") for o in ds]
        g = self.mem(ins.ops[1])
        self.min_sh = min(self.min_sh, 2)
        ins.kind = K_WARP
        full = u32(0xFFFFFFFF)
        ins.aux = lambda x: full

        def fn(x, m):
            ad = g(x, None).reshape(-1, 32)
            w = np.arange(x.T // 32) if m is None else np.flatnonzero(m.reshape(-1, 32).any(1))
            for k in range(num):
                rows = ad[w, 8 * k : 8 * k + 8]  # row addresses
                idx = (w[:, None] * 32 + 8 * k + np.arange(8)).reshape(-1)
                v = np.stack(x.load("shared", idx, rows.reshape(-1), 2, 8, ins), 1).reshape(
                    len(w), 8, 8
                )
                if tr:
                    v = v.transpose(0, 2, 1)
                out = np.zeros((x.T // 32, 32), u32)
                lane = np.arange(32)
                lo, hi = v[:, lane // 4, 2 * (lane % 4)], v[:, lane // 4, 2 * (lane % 4) + 1]
                out[w] = lo.astype(u32) | (hi.astype(u32) << u32(16))
                puts[k](x, m, out.reshape(-1))

        return fn

    def c_stmatrix(self, ins):
        P = ins.parts
        num = {"x1": 1, "x2": 2, "x4": 4}[next(p for p in P if p in ("x1", "x2", "x4"))]
        if "m8n8" not in P or P[-1] != "b16":
            raise UnknownInstruction(ins.op)
        tr = "trans" in P
        ss = ins.ops[1][1] if ins.ops[1][0] == "v" else [ins.ops[1]]
        gs = [self.src(o, "b32") for o in ss]
        g = self.mem(ins.ops[0])
        self.min_sh = min(self.min_sh, 2)
        ins.kind = K_WARP
        full = u32(0xFFFFFFFF)
        ins.aux = lambda x: full
        lane = np.arange(32)

        def fn(x, m):
            ad = g(x, None).reshape(-1, 32)
            w = np.arange(x.T // 32) if m is None else np.flatnonzero(m.reshape(-1, 32).any(1))
            for k in range(num):
                r = np.broadcast_to(np.asarray(gs[k](x)), x.T).reshape(-1, 32)[w]
                v = np.zeros((len(w), 8, 8), u16)
                v[:, lane // 4, 2 * (lane % 4)] = (r & u32(0xFFFF)).astype(u16)
                v[:, lane // 4, 2 * (lane % 4) + 1] = (r >> u32(16)).astype(u16)
                if tr:
                    v = v.transpose(0, 2, 1)
                idx = (w[:, None] * 32 + 8 * k + np.arange(8)).reshape(-1)
                flat = np.ascontiguousarray(v).reshape(-1, 8)
                x.store(
                    "shared",
                    idx,
                    ad[w, 8 * k : 8 * k + 8].reshape(-1),
                    2,
                    [np.ascontiguousarray(flat[:, j]) for j in range(8)],
                    ins,
                )

        return fn

    def c_mma(self, ins):
        P = ins.parts
        shp = next((p for p in P if re.match(r"^m\d+n\d+k\d+$", p)), None)
        dt, at, bt, ct = [p for p in P[1:] if p in SIZE][-4:]
        if (
            shp not in ("m16n8k16", "m16n8k8")
            or at != bt
            or at not in ("f16", "bf16", "tf32")
            or any(p.startswith(("sp", "kind")) for p in P)
            or "row" not in P
        ):
            raise UnknownInstruction(ins.op)
        if at == "tf32" and shp != "m16n8k8":
            raise UnknownInstruction(ins.op)
        Kd = int(shp.split("k")[1])
        D, A, B, C = (o[1] for o in ins.ops)
        lane = np.arange(32)
        gid, tig = lane // 4, lane % 4
        ga = [self.src(o, "b32") for o in A]
        gb = [self.src(o, "b32") for o in B]

        def half(v):
            v = np.ascontiguousarray(np.broadcast_to(np.asarray(v), (v.size,)))
            return (v.view(f16).astype(f32) if at == "f16" else bf2f(v.view(u16))).reshape(
                -1, 32, 2
            )

        gc = [self.src(o, "f32") for o in C] if ct == "f32" else [self.src(o, "b32") for o in C]
        pd = [self.dst(o, "f32" if dt == "f32" else "b32") for o in D]
        ins.kind = K_WARP
        full = u32(0xFFFFFFFF)
        ins.aux = lambda x: full

        def bc(x, g):
            return np.broadcast_to(np.asarray(g(x)), x.T)

        def fn(x, m):
            W = x.T // 32
            Am, Bm, Cm = (
                np.zeros((W, 16, Kd), f64),
                np.zeros((W, Kd, 8), f64),
                np.zeros((W, 16, 8), f64),
            )
            if at == "tf32":
                for i, g in enumerate(ga):
                    v = np.ascontiguousarray(bc(x, g) & u32(0xFFFFE000)).view(f32).reshape(W, 32)
                    Am[:, gid + 8 * (i & 1), tig + 4 * (i >> 1)] = v
                for i, g in enumerate(gb):
                    Bm[:, tig + 4 * i, gid] = (
                        np.ascontiguousarray(bc(x, g) & u32(0xFFFFE000)).view(f32).reshape(W, 32)
                    )
            else:
                for i, g in enumerate(ga):
                    v = half(bc(x, g))
                    for e in range(2):
                        Am[:, gid + 8 * (i & 1), 2 * tig + e + 8 * (i >> 1)] = v[:, :, e]
                for i, g in enumerate(gb):
                    v = half(bc(x, g))
                    for e in range(2):
                        Bm[:, 2 * tig + e + 8 * i, gid] = v[:, :, e]
            if ct == "f32":
                for i, g in enumerate(gc):
                    Cm[:, gid + 8 * (i >> 1), 2 * tig + (i & 1)] = bc(x, g).reshape(W, 32)
            else:
                for i, g in enumerate(gc):
                    v = np.ascontiguousarray(bc(x, g)).view(f16).reshape(W, 32, 2)
                    for e in range(2):
                        Cm[:, gid + 8 * i, 2 * tig + e] = v[:, :, e]
            R = Am @ Bm + Cm
            if dt == "f32":
                for i, p in enumerate(pd):
                    p(x, m, R[:, gid + 8 * (i >> 1), 2 * tig + (i & 1)].astype(f32).reshape(-1))
            else:
                for i, p in enumerate(pd):
                    v = np.stack(
                        [R[:, gid + 8 * i, 2 * tig], R[:, gid + 8 * i, 2 * tig + 1]], 2
                    ).astype(f16)
                    p(x, m, np.ascontiguousarray(v).view(u32).reshape(-1))

        return fn
