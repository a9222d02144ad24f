"""Small PTX kernels for the tests of the emulator, and an oracle for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from emulator import emulator

HEADER = ".version 8.3\n.target sm_90\n.address_size 64\n"
BYTES = {"16": 2, "32": 4, "64": 8}
THREADS = 128


def launch(
    body: str, arguments: Sequence[Any], block: int = 32, grid: int = 1, **options: Any
) -> Any:
    """Run statements that find the arguments' addresses in %p0, %p1, ..., the thread in %t and the
    thread of the grid in %i. The registers %r, %s, %u (32 bit), %l (64 bit), %f, %d, %h (16 bit)
    and %q (predicates) are free."""
    count = len(arguments)
    parameters = ", ".join(f".param .u64 a{number}" for number in range(count))
    loads = "\n".join(f"ld.param.u64 %p{number}, [a{number}];" for number in range(count))
    text = f"""{HEADER}
.visible .entry kernel({parameters}) {{
  .reg .b64 %p<{count + 1}>; .reg .b64 %l<16>; .reg .b32 %r<16>; .reg .b32 %s<8>; .reg .b32 %u<8>;
  .reg .f32 %f<16>; .reg .f64 %d<16>; .reg .b16 %h<16>; .reg .pred %q<8>;
  .reg .b32 %t; .reg .b32 %i; .reg .b32 %n;
  {loads}
  mov.u32 %t, %tid.x;
  mov.u32 %i, %ctaid.x;
  mov.u32 %n, %ntid.x;
  mad.lo.u32 %i, %i, %n, %t;
  {body}
  ret;
}}"""
    module = emulator().Module(text)
    return module.launch("kernel", grid=(grid,), block=(block,), args=list(arguments), **options)


def elementwise(instruction: str, inputs: Sequence[np.ndarray], kind: str, out: Any) -> np.ndarray:
    """One thread for each element: kind has the register types of the inputs and of the result,
    such as "f32 f32 b16"; the instruction finds them in a, b, c and leaves the result in z."""
    *sources, result = kind.split()
    arrays = [np.ascontiguousarray(array) for array in inputs]
    count = len(arrays[0])
    padded = -(-count // THREADS) * THREADS
    arrays = [np.concatenate([array, array[:1].repeat(padded - count)]) for array in arrays]
    made = np.zeros(padded, out)
    loads = "".join(_element(n, "ld", type, "abcd"[n]) for n, type in enumerate(sources))
    names = "".join(f".reg .{type} {'abcd'[n]};" for n, type in enumerate(sources))
    body = f"""{names} .reg .{result} z;
      {loads}
      {instruction}
      {_element(len(sources), "st", result, "z")}"""
    launch(body, [*arrays, made], THREADS, padded // THREADS)
    return made[:count]


def _element(number: int, action: str, type: str, register: str) -> str:
    size = BYTES[type.lstrip("abcdefsu")]
    place = f"mad.wide.u32 %l{number}, %i, {size}, %p{number};"
    width = f"b{8 * size}"
    if action == "ld":
        return f"{place} ld.global.{width} {register}, [%l{number}];\n"
    return f"{place} st.global.{width} [%l{number}], {register};\n"


def rounded(value: Fraction, dtype: Any, mode: str) -> Any:
    """The neighbor of an exact value that IEEE 754 chooses, found by comparing fractions."""
    guess = dtype(float(value))
    if Fraction(float(guess)) > value:
        above, below = guess, np.nextafter(guess, dtype(-np.inf))
    else:
        below, above = guess, np.nextafter(guess, dtype(np.inf))
    if Fraction(float(below)) == value:
        return below
    if mode == "rm":
        return below
    if mode == "rp":
        return above
    if mode == "rz":
        return below if value > 0 else above
    down, up = value - Fraction(float(below)), Fraction(float(above)) - value
    if down != up:
        return below if down < up else above
    bits = np.array([below]).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype(0).nbytes])
    return above if bits[0] & 1 else below
