"""Floating-point arithmetic with correct rounding, in arrays."""

from __future__ import annotations

import numpy as np

from .errors import UnknownInstruction
from .types import TINY, f32, f64, i32, i64, u8, u16, u32


def two_sum(a, b):
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def add_odd(a, b):
    """A+b in float64 rounded to odd (so that a later narrowing rounding is correct)."""
    s, e = two_sum(a, b)
    s = np.asarray(s, f64)
    bits = s.view(i64)
    fix = (e != 0) & ((bits & 1) == 0) & np.isfinite(s) & np.isfinite(e)
    if not np.any(fix):
        return s
    up = (e > 0) == (s > 0)  # away from zero when the error has the sign of s
    return np.where(fix, np.where(up, bits + 1, bits - 1), bits).view(f64)


def two_prod(a, b):
    p = a * b
    C = 134217729.0
    t = C * a
    ah = t - (t - a)
    al = a - ah
    t = C * b
    bh = t - (t - b)
    bl = b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def fma64(a, b, c):
    """Correctly rounded double fma (Boldo-Melquiond), unless an intermediate overflows."""
    a, b, c = (np.asarray(v, f64) for v in (a, b, c))
    uh, ul = two_prod(a, b)
    th, tl = two_sum(c, ul)
    vh, vl = two_sum(uh, th)
    z = add_odd(tl, vl)
    r = vh + z
    plain = a * b + c
    big = (
        ~np.isfinite(r)
        | (np.abs(a) > 1e150)
        | (np.abs(b) > 1e150)
        | (np.abs(uh) < 1e-290)
        | (uh == 0)
    )
    return np.where(big, plain, r)


def narrow(v, dt, mode="rn"):
    """Float64 -> float32/float16 with rounding mode."""
    r = np.asarray(v).astype(dt)
    if mode in ("rn", None):
        return r
    r64 = r.astype(f64)
    if mode == "rz":
        return np.where(np.abs(r64) > np.abs(v), np.nextafter(r, dt(0)), r)
    if mode == "rm":
        return np.where(r64 > v, np.nextafter(r, dt(-np.inf)), r)
    if mode == "rp":
        return np.where(r64 < v, np.nextafter(r, dt(np.inf)), r)
    if mode == "rna":
        raise UnknownInstruction("rounding .rna here")
    raise UnknownInstruction("rounding " + mode)


def f64_to_f32_odd(v):
    v = np.asarray(v, f64)
    r = v.astype(f32)
    b = np.atleast_1d(r).view(u32)
    v1 = np.atleast_1d(v)
    r1 = np.atleast_1d(r).astype(f64)
    fix = (r1 != v1) & ((b & 1) == 0) & ~np.isnan(v1)
    if fix.any():
        up = np.abs(v1) > np.abs(r1)
        b = np.where(fix, np.where(up, b + u32(1), b - u32(1)), b)
    return b.view(f32).reshape(v.shape)


def bf2f(h):
    return (np.asarray(h, u16).astype(u32) << u32(16)).view(f32)


def f2bf(v, mode="rn"):
    """Float32 or float64 -> bf16 bits."""
    v = np.asarray(v)
    if v.dtype != f32:
        v = f64_to_f32_odd(v)
    b = np.ascontiguousarray(v).view(u32).reshape(v.shape)
    if mode in ("rn", None):
        r = (b + u32(0x7FFF) + ((b >> u32(16)) & u32(1))) >> u32(16)
    else:
        r = b >> u32(16)
        inex = (b & u32(0xFFFF)) != 0
        neg = (b >> u32(31)) != 0
        if mode == "rm":
            r = r + (inex & neg)
        elif mode == "rp":
            r = r + (inex & ~neg)
        elif mode == "rna":
            r = (b + u32(0x8000)) >> u32(16)
        elif mode != "rz":
            raise UnknownInstruction("bf16 rounding " + mode)
    return np.where(np.isnan(v), u32(0x7FFF), r).astype(u16)


def ftz(a, t="f32"):
    return np.where(np.abs(a) < TINY[t], np.copysign(a.dtype.type(0), a), a)


def fp8_decode(h, kind):
    h = np.asarray(h).astype(i32) & 0xFF
    s = np.where(h & 0x80, -1.0, 1.0)
    if kind == "e4m3":
        e, m = (h >> 3) & 15, h & 7
        v = np.where(e == 0, m * 2.0**-9, (1 + m / 8.0) * 2.0 ** (e - 7.0))
        v = np.where((e == 15) & (m == 7), np.nan, v)
    else:
        e, m = (h >> 2) & 31, h & 3
        v = np.where(e == 0, m * 2.0**-16, (1 + m / 4.0) * 2.0 ** (e - 15.0))
        v = np.where(e == 31, np.where(m == 0, np.inf, np.nan), v)
    return (s * v).astype(f32)


def fp8_encode(v, kind):
    """Satfinite, round to nearest even."""
    v = np.asarray(v, f64)
    mb, emin, mx, nan = (3, -6, 448.0, 0x7F) if kind == "e4m3" else (2, -14, 57344.0, 0x7F)
    a = np.minimum(np.abs(v), mx)
    e = np.maximum(np.floor(np.log2(np.where(a > 0, a, 1e-300))), emin)
    q = np.rint(a / 2.0 ** (e - mb))  # in units of the last place
    up = q >= 2 ** (mb + 1)
    e = np.where(up, e + 1, e)
    q = np.where(up, q / 2, q)
    q = q.astype(i64)
    sub = q < 2**mb
    code = np.where(sub, q, ((e - emin + 1).astype(i64) << mb) | (q - 2**mb))
    mxc = 0x7E if kind == "e4m3" else 0x7B
    code = np.minimum(code, mxc)
    code = code | np.where(np.signbit(v), 0x80, 0)
    return np.where(np.isnan(v), nan, code).astype(u8)


def dir_adjust(r, e, mode):
    if mode == "rz":
        k = (e != 0) & ((e > 0) != (r > 0))
        return np.where(k, np.nextafter(r, 0.0), r)
    if mode == "rm":
        return np.where(e < 0, np.nextafter(r, -np.inf), r)
    if mode == "rp":
        return np.where(e > 0, np.nextafter(r, np.inf), r)
    return r


def narrow_ld(a, dt, mode):
    v = np.asarray(a).astype(np.longdouble)
    r = v.astype(dt)
    if mode == "rn":
        return r
    r2 = r.astype(np.longdouble)
    if mode == "rz":
        return np.where(np.abs(r2) > np.abs(v), np.nextafter(r, dt(0)), r)
    if mode == "rm":
        return np.where(r2 > v, np.nextafter(r, dt(-np.inf)), r)
    return np.where(r2 < v, np.nextafter(r, dt(np.inf)), r)
