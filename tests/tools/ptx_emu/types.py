"""PTX types as numpy types, and where each kind of memory is addressed."""

from __future__ import annotations

import numpy as np

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64 = np.int8, np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64
UDT = {1: u8, 2: u16, 4: u32, 8: u64}
SDT = {1: i8, 2: i16, 4: i32, 8: i64}
SIZE = {}
for _b in (8, 16, 32, 64):
    for _c in "usb":
        SIZE[f"{_c}{_b}"] = _b // 8
SIZE.update(
    {
        "f16": 2,
        "bf16": 2,
        "f32": 4,
        "f64": 8,
        "f16x2": 4,
        "bf16x2": 4,
        "f32x2": 8,
        "u16x2": 4,
        "s16x2": 4,
        "tf32": 4,
        "e4m3x2": 2,
        "e5m2x2": 2,
        "b128": 16,
        "pred": 1,
    }
)
FLOATS = {"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"}
X2 = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32", "u16x2": "u16", "s16x2": "s16"}


def npdt(t):
    """Storage dtype of a scalar PTX type (bf16 -> uint16)."""
    if t[0] == "f" and t in ("f16", "f32", "f64"):
        return {"f16": f16, "f32": f32, "f64": f64}[t]
    n = SIZE[t]
    return SDT[n] if t[0] == "s" else UDT[n]


SLOT = 36  # each buffer owns one 2**36-byte window, base in its middle


def slot_base(i):
    return (i << SLOT) + (1 << (SLOT - 1))


SH_SLOT, LO_SLOT, PA_SLOT = 0x3F0, 0x3F1, 0x3F2
WIN = {"shared": SH_SLOT << SLOT, "local": LO_SLOT << SLOT, "param": PA_SLOT << SLOT}
BIG = 1 << 30
TINY = {"f32": f32(2.0**-126), "f16": f32(2.0**-14), "bf16": f32(2.0**-126), "f64": f64(2.0**-1022)}
MAXF = {
    "f16": 65504.0,
    "bf16": 3.3895313892515355e38,
    "f32": 3.4028234663852886e38,
    "f64": 1.7976931348623157e308,
}
