"""Binds the arguments of a launch to the parameters of its kernel."""

from __future__ import annotations

import numpy as np

from .buffers import Buffer, Ptr, _as_bytes, _is_array
from .errors import PTXError
from .types import f16, f32, f64, npdt, slot_base, u8


class Arguments:
    """Binds the arguments of a launch to the parameters of its kernel."""

    def _bind(self, args):
        prog = self.prog
        args = list(args)
        if len(args) > len(prog.params):
            raise PTXError(f"{prog.name} takes {len(prog.params)} parameters, got {len(args)}")
        pb = np.zeros(-(-prog.param_size // 16) * 16, u8)
        arrays = []
        for k, a in enumerate(args):
            p = prog.params[k]
            arr = a.arr if isinstance(a, Ptr) else a
            if _is_array(arr) and not (
                isinstance(arr, np.ndarray) and p.type == "b8" and p.size == arr.nbytes
            ):
                b = _as_bytes(arr)
                arrays.append((b.size, b.__array_interface__["data"][0], b, k))
        slot = max([0, *list(self.bufs)]) + 1
        where = {}
        placed = []
        for n, ptr, b, k in sorted(arrays, key=lambda e: -e[0]):
            hit = None
            for q0, q1, buf in placed:
                if n and q0 <= ptr and ptr + n <= q1:
                    hit = (buf, ptr - q0)
                    break
                if n and not (ptr + n <= q0 or ptr >= q1):
                    raise PTXError("array arguments overlap partially in memory")
            if hit is None:
                buf = Buffer(b, slot_base(slot), f"arg{k}")
                self.bufs[slot] = buf
                slot += 1
                placed.append((ptr, ptr + n, buf))
                hit = (buf, 0)
            where[k] = hit
        for k, p in enumerate(prog.params):
            n = p.size
            if k >= len(args) or args[k] is None:
                if p.size != 8 and k >= len(args):
                    raise PTXError(f"argument {k} ({p.name}, .{p.type}) missing")
                continue  # null pointer: e.g. the scratch pointers that Triton appends
            a = args[k]
            if k in where:
                buf, off = where[k]
                if n != 8:
                    raise PTXError(f"argument {k} ({p.name}) is .{p.type}, got an array")
                o = off + (a.offset if isinstance(a, Ptr) else 0)
                raw = (buf.base + o).to_bytes(8, "little")
                self.arg_bufs.append((k, buf, where[k][0].n if off == 0 else None))
            elif isinstance(a, (bytes, bytearray)):
                raw = bytes(a)
            elif (isinstance(a, np.ndarray) and a.ndim > 0) or (
                isinstance(a, np.generic) and not isinstance(a, np.bool_) and p.type[0] == "b"
            ):
                raw = a.tobytes()
            elif p.type in ("f16", "f32", "f64"):
                raw = npdt(p.type)(a).tobytes()
            elif isinstance(a, (float, np.floating)):
                raw = (
                    f32(a).tobytes() if n == 4 else f64(a).tobytes() if n == 8 else f16(a).tobytes()
                )
            elif isinstance(a, (int, np.integer, bool, np.bool_)):
                raw = (int(a) & ((1 << 8 * n) - 1)).to_bytes(n, "little")
            elif hasattr(a, "item"):
                a = a.item()
                raw = (
                    (f32(a).tobytes() if n == 4 else f64(a).tobytes())
                    if isinstance(a, float)
                    else (int(a) & ((1 << 8 * n) - 1)).to_bytes(n, "little")
                )
            else:
                raise PTXError(
                    f"argument {k} ({p.name}, .{p.type}): {type(a).__name__} not understood"
                )
            if len(raw) != n:
                raise PTXError(f"argument {k} ({p.name}) has {n} bytes, got {len(raw)}")
            pb[p.addr : p.addr + n] = np.frombuffer(raw, u8)
        self.pbuf = Buffer(pb, 0, "param")
