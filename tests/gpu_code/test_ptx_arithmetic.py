"""The PTX emulator's arithmetic, against exact fractions, Python's integers and torch.

The kernels are written by hand, one instruction each. The emulator has never been compared with a
GPU; these tests compare it with what the PTX manual defines.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx_kernels import elementwise, rounded

MODES = ("rn", "rz", "rm", "rp")
RANDOM = np.random.default_rng(0)
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def wide_floats(dtype: type, count: int = 200) -> np.ndarray:
    """Both signs, exponents apart, and values whose sums cancel or tie."""
    exponents = RANDOM.integers(-20, 20, count)
    values = np.ldexp(RANDOM.uniform(1, 2, count), exponents) * RANDOM.choice([-1, 1], count)
    values[:8] = [1, -1, 3, 2**-24, 1 + 2**-23, -(2**-25), 2**24, 5]
    return values.astype(dtype)


def fractions(array: np.ndarray) -> list[Fraction]:
    return [Fraction(float(value)) for value in array]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f64", np.float64)])
@pytest.mark.parametrize("name", ["add", "mul", "fma", "div"])
def test_floats_are_rounded_as_asked(name: str, kind: str, dtype: type, mode: str) -> None:
    a, b = wide_floats(dtype), np.roll(wide_floats(dtype), 7)
    c = (-a.astype(np.float64) * b).astype(dtype)  # the sum of an fma cancels
    c[::3] = wide_floats(dtype)[::3]
    inputs = [a, b, c] if name == "fma" else [a, b]
    operands = ", ".join("abc"[: len(inputs)])
    made = elementwise(
        f"{name}.{mode}.{kind} z, {operands};", inputs, f"{kind} " * len(inputs) + kind, dtype
    )
    exact: dict[str, Callable[..., Fraction]] = {
        "add": lambda x, y: x + y,
        "mul": lambda x, y: x * y,
        "fma": lambda x, y, z: x * y + z,
        "div": lambda x, y: x / y,
    }
    values = [exact[name](*given) for given in zip(*map(fractions, inputs), strict=True)]
    expected = [rounded(value, dtype, mode) for value in values]
    nonzero = np.array([value != 0 for value in values])
    np.testing.assert_array_equal(made[nonzero], np.array(expected)[nonzero])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_roots_and_reciprocals_are_rounded_as_asked(kind: str, dtype: type, mode: str) -> None:
    values = np.abs(wide_floats(dtype))
    inverse = elementwise(f"rcp.{mode}.{kind} z, a;", [values], f"{kind} {kind}", dtype)
    exact = [rounded(1 / value, dtype, mode) for value in fractions(values)]
    np.testing.assert_array_equal(inverse, np.array(exact))
    roots = elementwise(f"sqrt.{mode}.{kind} z, a;", [values], f"{kind} {kind}", dtype)
    for value, root in zip(fractions(values), roots, strict=True):
        below, above = (float(np.nextafter(root, dtype(end))) for end in (-np.inf, np.inf))
        low, found, high = Fraction(below), Fraction(float(root)), Fraction(above)
        if mode == "rn":  # nearer than half of the way to either neighbor
            assert ((low + found) / 2) ** 2 < value < ((found + high) / 2) ** 2
        elif mode == "rp":
            assert low**2 < value <= found**2
        else:
            assert found**2 <= value < high**2


def test_the_rounding_modes_differ() -> None:
    """The control: with values whose sum needs rounding, no two modes agree everywhere."""
    a, b = wide_floats(np.float32), np.roll(wide_floats(np.float32), 7)
    made = [
        elementwise(f"add.{mode}.f32 z, a, b;", [a, b], "f32 f32 f32", np.float32) for mode in MODES
    ]
    for one in range(4):
        for other in range(one):
            assert not np.array_equal(made[one], made[other])


def test_subnormal_numbers_are_kept_unless_they_are_flushed() -> None:
    tiny = np.array([2.0**-140, -(2.0**-130), 1], np.float32)
    kept = elementwise("add.f32 z, a, a;", [tiny], "f32 f32", np.float32)
    flushed = elementwise("add.ftz.f32 z, a, a;", [tiny], "f32 f32", np.float32)
    np.testing.assert_array_equal(kept, 2 * tiny)
    np.testing.assert_array_equal(flushed, np.array([0, 0, 2], np.float32))


SPECIAL = np.array(
    [0, -0.0, 1, -1, 65504, 65520, 1e-8, 6e-8, 3e38, np.inf, -np.inf, np.nan, 1.00048828125, 1e-40],
    np.float32,
)


def as_torch(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_is_that_of_torch(kind: str, dtype: torch.dtype) -> None:
    values = np.concatenate([SPECIAL, wide_floats(np.float32), wide_floats(np.float32) * 2.0**-20])
    made = elementwise(f"cvt.rn.{kind}.f32 z, a;", [values], "f32 b16", np.uint16)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(made[numbers], as_torch(values, dtype)[numbers])
    every = np.arange(2**16, dtype=np.uint16)
    back = elementwise(f"cvt.f32.{kind} z, a;", [every], "b16 f32", np.float32)
    expected = torch.from_numpy(every.view(np.int16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(back, expected)
    assert np.isnan(made[~numbers].view(np.float16)).all() if kind == "f16" else True


def test_packed_half_precision() -> None:
    high, low = wide_floats(np.float32), np.roll(wide_floats(np.float32), 3)
    made = elementwise("cvt.rn.bf16x2.f32 z, a, b;", [high, low], "f32 f32 b32", np.uint32)
    np.testing.assert_array_equal(made >> 16, as_torch(high, torch.bfloat16))
    np.testing.assert_array_equal(made & 0xFFFF, as_torch(low, torch.bfloat16))
    half = RANDOM.uniform(-8, 8, (3, 64, 2)).astype(np.float16)
    packed = [array.view(np.uint32)[:, 0] for array in half]
    made = elementwise("fma.rn.f16x2 z, a, b, c;", packed, "b32 b32 b32 b32", np.uint32)
    exact = [
        rounded(x * y + z, np.float16, "rn")
        for x, y, z in zip(*(fractions(array.reshape(-1)) for array in half), strict=True)
    ]
    np.testing.assert_array_equal(made.view(np.float16), np.array(exact, np.float16))


@pytest.mark.parametrize("mode", MODES)
def test_doubles_become_floats(mode: str) -> None:
    values = wide_floats(np.float64)
    made = elementwise(f"cvt.{mode}.f32.f64 z, a;", [values], "f64 f32", np.float32)
    expected = [rounded(value, np.float32, mode) for value in fractions(values)]
    np.testing.assert_array_equal(made, np.array(expected))


@pytest.mark.parametrize(
    ("mode", "exact"),
    [("rni", round), ("rzi", int), ("rmi", np.floor), ("rpi", np.ceil)],
)
def test_floats_become_integers_that_saturate(mode: str, exact: Callable) -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 7.99, -7.99, 3e9, -3e9, np.inf, 123456.5], "f4")
    made = elementwise(f"cvt.{mode}.s32.f32 z, a;", [values], "f32 b32", np.int32)
    limited = [
        min(max(exact(float(value)) if np.isfinite(value) else 2**40, -(2**31)), 2**31 - 1)
        for value in values
    ]
    assert made.tolist() == [int(value) for value in limited]
    nothing = elementwise(
        f"cvt.{mode}.s32.f32 z, a;", [np.array([np.nan], "f4")], "f32 b32", np.int32
    )
    assert nothing.tolist() == [0]


@pytest.mark.parametrize("mode", MODES)
def test_integers_become_floats(mode: str) -> None:
    values = RANDOM.integers(-(2**62), 2**62, 200) >> RANDOM.integers(0, 50, 200)
    made = elementwise(f"cvt.{mode}.f32.s64 z, a;", [values], "b64 f32", np.float32)
    expected = [rounded(Fraction(int(value)), np.float32, mode) for value in values]
    np.testing.assert_array_equal(made, np.array(expected))
    bytes_ = elementwise("cvt.sat.u8.s32 z, a;", [values.astype(np.int32)], "b32 b32", np.uint32)
    np.testing.assert_array_equal(bytes_, np.clip(values.astype(np.int32), 0, 255))


# --- integers

EDGES = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF0000, 0x12345678]
WORDS = np.array([*EDGES, *RANDOM.integers(0, 2**32, 189)], np.uint32)
LONGS = np.concatenate([WORDS, RANDOM.integers(0, 2**64, 100, np.uint64)]).astype(np.uint64)
LONGS[-3:] = [2**63, 2**64 - 1, 2**63 - 1]


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


INTEGER = {
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a, 32) * signed(b, 32) >> 32,
    "mul.lo.s32": lambda a, b: a * b,
    "sub.u32": lambda a, b: a - b,
    "div.u32": lambda a, b: a // b if b else None,
    "rem.u32": lambda a, b: a % b if b else None,
    "div.s32": lambda a, b: int(Fraction(signed(a, 32), signed(b, 32))) if b else None,
    "rem.s32": lambda a, b: (
        signed(a, 32) - signed(b, 32) * int(Fraction(signed(a, 32), signed(b, 32))) if b else None
    ),
    "min.s32": lambda a, b: min(signed(a, 32), signed(b, 32)),
    "max.u32": lambda a, b: max(a, b),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> min(b, 32),
    "shr.s32": lambda a, b: signed(a, 32) >> min(b, 31),
}


@pytest.mark.parametrize("name", INTEGER)
def test_integers_of_32_bits(name: str) -> None:
    other = np.roll(WORDS, 5)
    if name.startswith("sh"):
        other = other % 40
    made = elementwise(f"{name} z, a, b;", [WORDS, other], "b32 b32 b32", np.uint32)
    for a, b, found in zip(WORDS.tolist(), other.tolist(), made.tolist(), strict=True):
        if (expected := INTEGER[name](a, b)) is not None:
            assert found == expected & MASK32, (a, b)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("mul.hi.u64", lambda a, b: a * b >> 64),
        ("mul.hi.s64", lambda a, b: signed(a, 64) * signed(b, 64) >> 64),
        ("mul.lo.u64", lambda a, b: a * b),
        ("add.u64", lambda a, b: a + b),
        ("max.s64", lambda a, b: max(signed(a, 64), signed(b, 64))),
    ],
)
def test_integers_of_64_bits(name: str, exact: Callable) -> None:
    other = np.roll(LONGS, 5)
    made = elementwise(f"{name} z, a, b;", [LONGS, other], "b64 b64 b64", np.uint64)
    pairs = zip(LONGS.tolist(), other.tolist(), strict=True)
    assert made.tolist() == [exact(a, b) & MASK64 for a, b in pairs]


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("mad.lo.u32", lambda a, b, c: a * b + c),
        ("mad.hi.s32", lambda a, b, c: (signed(a, 32) * signed(b, 32) >> 32) + c),
        ("sad.u32", lambda a, b, c: abs(a - b) + c),
        ("lop3.b32", lambda a, b, c: (a & b) ^ c),
        ("shf.l.wrap.b32", lambda a, b, c: (b << 32 | a) << (c % 32) >> 32),
        ("shf.r.clamp.b32", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
        ("bfe.u32", lambda a, b, c: field(a, b, c)),
        ("bfe.s32", lambda a, b, c: signed_field(a, b, c)),
    ],
)
def test_three_integers(name: str, exact: Callable) -> None:
    b, c = np.roll(WORDS, 5), np.roll(WORDS, 11)
    if name.startswith("bfe"):
        b, c = b % 40, c % 40
    table = ", 0x6a" if name.startswith("lop3") else ""
    made = elementwise(f"{name} z, a, b, c{table};", [WORDS, b, c], "b32 " * 3 + "b32", np.uint32)
    given = zip(WORDS.tolist(), b.tolist(), c.tolist(), strict=True)
    assert made.tolist() == [exact(*values) & MASK32 for values in given]


def field(value: int, start: int, length: int) -> int:
    return value >> start & (1 << length) - 1


def signed_field(value: int, start: int, length: int) -> int:
    """bfe.s32: the sign is that of the highest bit of the field, or bit 31 beyond the word."""
    if length == 0:
        return 0
    word = signed(value, 32) >> min(start, 31)
    return signed(word & (1 << length) - 1, length) if start + length <= 32 else word


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("popc.b32", lambda a: a.bit_count()),
        ("clz.b32", lambda a: 32 - a.bit_length()),
        ("brev.b32", lambda a: int(f"{a:032b}"[::-1], 2)),
        ("bfind.u32", lambda a: a.bit_length() - 1),
        ("abs.s32", lambda a: abs(signed(a, 32))),
        ("not.b32", lambda a: ~a),
    ],
)
def test_bits_of_one_integer(name: str, exact: Callable) -> None:
    made = elementwise(f"{name} z, a;", [WORDS], "b32 b32", np.uint32)
    assert made.tolist() == [exact(a) & MASK32 for a in WORDS.tolist()]


def test_bytes_are_permuted_and_fields_inserted() -> None:
    b, selector = np.roll(WORDS, 5), np.roll(WORDS, 11)
    made = elementwise("prmt.b32 z, a, b, c;", [WORDS, b, selector], "b32 " * 3 + "b32", np.uint32)
    for one, other, choice, found in zip(
        WORDS.tolist(), b.tolist(), selector.tolist(), made.tolist(), strict=True
    ):
        source = (other << 32 | one).to_bytes(8, "little")
        chosen = []
        for nibble in (choice >> shift & 15 for shift in (0, 4, 8, 12)):
            byte = source[nibble & 7]
            chosen.append((255 if byte >> 7 else 0) if nibble & 8 else byte)
        assert found == int.from_bytes(bytes(chosen), "little")
    made = elementwise("bfi.b32 z, a, b, 5, 9;", [WORDS, b], "b32 b32 b32", np.uint32)
    mask = 0x1FF << 5
    assert made.tolist() == [
        (base & ~mask) | (value << 5 & mask)
        for value, base in zip(WORDS.tolist(), b.tolist(), strict=True)
    ]
