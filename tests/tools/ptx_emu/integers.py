"""Integer arithmetic in arrays."""

from __future__ import annotations

import numpy as np

from .floats import bf2f, f2bf
from .types import SDT, SIZE, UDT, X2, f16, f32, npdt, u8, u16, u32, u64


def mulhi(a, b, t):
    n = SIZE[t]
    if n <= 4:
        wd = SDT[2 * n] if t[0] == "s" else UDT[2 * n]
        return ((a.astype(wd) * b.astype(wd)) >> wd(8 * n)).astype(npdt(t))
    ua, ub = np.atleast_1d(a).view(u64), np.atleast_1d(b).view(u64)
    M = u64(0xFFFFFFFF)
    S = u64(32)
    al, ah, bl, bh = ua & M, ua >> S, ub & M, ub >> S
    ll, lh, hl, hh = al * bl, al * bh, ah * bl, ah * bh
    mid = (ll >> S) + (lh & M) + (hl & M)
    r = hh + (lh >> S) + (hl >> S) + (mid >> S)
    if t[0] == "s":
        r = (
            r
            - np.where(np.atleast_1d(a) < 0, ub, u64(0))
            - np.where(np.atleast_1d(b) < 0, ua, u64(0))
        )
    return r.view(npdt(t))


def idivrem(a, b, t):
    dt = npdt(t)
    if t[0] != "s":
        z = b == 0
        bb = np.where(z, dt(1), b)
        q = a // bb
        return np.where(z, ~dt(0), q), np.where(z, a, a - q * bb)
    ud = UDT[SIZE[t]]
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    ua = np.where(a < 0, ud(0) - a.view(ud), a.view(ud))
    ub = np.where(b < 0, ud(0) - b.view(ud), b.view(ud))
    z = ub == 0
    ub1 = np.where(z, ud(1), ub)
    q = ua // ub1
    r = ua - q * ub1
    q = np.where((a < 0) ^ (b < 0), ud(0) - q, q)
    r = np.where(a < 0, ud(0) - r, r)
    return np.where(z, dt(-1), q.view(dt)), np.where(z, a, r.view(dt))


def shl64(a, n):
    return np.where(n >= u64(64), u64(0), a << (n & u64(63)))


def shr64(a, n):
    return np.where(n >= u64(64), u64(0), a >> (n & u64(63)))


def lowmask(n):
    return np.where(n >= u64(64), ~u64(0), (u64(1) << (n & u64(63))) - u64(1))


def popc(a):
    a = np.atleast_1d(a)
    b = np.ascontiguousarray(a).view(u8).reshape(a.size, -1)
    return POP8[b].sum(1).astype(u32)


POP8 = np.array([bin(i).count("1") for i in range(256)], u32)


def bitlen(a):
    a = np.atleast_1d(a)
    v = a.view(UDT[a.itemsize]).astype(u64)
    r = np.zeros(a.shape, u32)
    for s in (32, 16, 8, 4, 2, 1):
        h = v >> u64(s)
        k = h != 0
        r = r + np.where(k, u32(s), u32(0))
        v = np.where(k, h, v)
    return r + (v != 0).astype(u32)


B32 = u64(1) << np.arange(32, dtype=u64)


def bits32(b):
    """(W,32) bool -> (W,) uint32"""
    return (b * B32).sum(1, dtype=u64).astype(u32)


def atomic_fn(op, t):
    """Comb(old_raw, b_raw, c_raw) -> new_raw, all unsigned raw arrays."""
    n = SIZE[t]
    ud = UDT[n]
    if op == "exch":
        return lambda o, b, c: b
    if op == "cas":
        return lambda o, b, c: np.where(o == b, c, o)
    if op in ("and", "or", "xor"):
        f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
        return lambda o, b, c: f(o, b)
    if op == "inc":
        return lambda o, b, c: np.where(o >= b, ud(0), o + ud(1))
    if op == "dec":
        return lambda o, b, c: np.where((o == 0) | (o > b), b, o - ud(1))
    bt = X2.get(t, t)
    if bt in ("f16", "bf16"):
        dec = (lambda v: v.view(f16).astype(f32)) if bt == "f16" else (lambda v: bf2f(v.view(u16)))
        enc = (lambda v: v.astype(f16)) if bt == "f16" else f2bf
        f = {"add": np.add, "min": np.fmin, "max": np.fmax}[op]
        return lambda o, b, c: np.ascontiguousarray(enc(f(dec(o), dec(b)))).view(ud)
    dt = npdt(bt)
    if op == "add":
        return lambda o, b, c: (o.view(dt) + b.view(dt)).view(ud)
    f = (
        np.fmin
        if op == "min" and bt[0] == "f"
        else np.fmax
        if bt[0] == "f"
        else np.minimum
        if op == "min"
        else np.maximum
    )
    return lambda o, b, c: f(o.view(dt), b.view(dt)).view(ud)
