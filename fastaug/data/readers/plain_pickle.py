"""A reader for pickles of plain values and uint8 arrays that never calls the names in them.

An unpickler with a list of allowed classes is not enough: numpy's dtype accepts any state, and a
forged one turns bytes into pointers. Here numpy's names only label the data that follows.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fastaug.errors import DataError, parser_errors

_MAX_OPS = 2**21
"""CIFAR-100's train file has about 300,000. A hostile file can allocate 100 bytes with each."""


class _Name(NamedTuple):
    """A name that a pickle would import."""

    text: str


class _Call(NamedTuple):
    """A call that a pickle would make: name, arguments, and the state set afterwards."""

    name: str
    args: tuple
    state: list


class _Mark:
    pass


_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_DTYPE, _NDARRAY, _ENCODE = "numpy dtype", "numpy ndarray", "_codecs encode"
_ALLOWED = {*_RECONSTRUCT, _DTYPE, _NDARRAY, _ENCODE}

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": _Mark,
}
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
# Python 2's strings are bytes; pickletools gives them as latin-1 text.
_OLD_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
_STRINGS = {
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_plain_pickle(content: bytes) -> Any:
    """The value: dicts with text keys, lists, tuples, numbers, text, uint8 arrays.

    Raises DataError for anything else and for damaged pickles.
    """
    with parser_errors("truncated or damaged"):
        return _run(content)


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    arg: Any
    for number, (op, arg, _) in enumerate(pickletools.genops(content)):
        if number >= _MAX_OPS:
            raise DataError(f"more than {_MAX_OPS:,} values")
        name = op.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            (value,) = stack
            return _finished(value)
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _NUMBERS or name in _STRINGS:
            stack.append(arg)
        elif name in _OLD_STRINGS:
            stack.append(arg.encode("latin-1"))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[arg])
        elif name == "POP":
            stack.pop()
        else:
            _build(name, arg, stack)
    raise DataError("its end is missing")


def _build(name: str, arg: Any, stack: list[Any]) -> None:
    """Instructions that take values from the stack and push one."""
    if name in _TUPLES:
        items = stack[-_TUPLES[name] :]
        del stack[-_TUPLES[name] :]
        stack.append(tuple(items))
    elif name in ("TUPLE", "LIST"):
        items = _to_mark(stack)
        stack.append(tuple(items) if name == "TUPLE" else items)
    elif name in ("APPEND", "APPENDS"):
        items = _to_mark(stack) if name == "APPENDS" else [stack.pop()]
        _expect(stack[-1], list).extend(items)
    elif name in ("DICT", "SETITEM", "SETITEMS"):
        items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _to_mark(stack)
        if name == "DICT":
            stack.append({})
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing nested tuples, each with two references to the one before, would never end.
            _expect(key, (str, bytes))
            _expect(stack[-1], dict)[key] = value
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        parts = [stack.pop(-2), stack.pop()] if name == "STACK_GLOBAL" else [arg]
        text = " ".join(_expect(part, str) for part in parts)
        if text not in _ALLOWED:
            raise DataError(f"it names {text.replace(' ', '.')[:80]}, which CIFAR does not use")
        stack.append(_Name(text))
    elif name == "REDUCE":
        args = _expect(stack.pop(), tuple)
        stack.append(_call(_expect(stack.pop(), _Name).text, args))
    elif name == "BUILD":
        state = _expect(stack.pop(), tuple)
        _expect(stack[-1], _Call).state[:] = state
    else:
        raise DataError(f"an instruction that CIFAR does not use ({name})")


def _to_mark(stack: list[Any]) -> list[Any]:
    place = next(i for i in range(len(stack) - 1, -1, -1) if isinstance(stack[i], _Mark))
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _expect(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise DataError(f"a {type(value).__name__} in the wrong place")
    return value


def _call(name: str, args: tuple) -> Any:
    if name == _ENCODE:  # how protocol 2 of Python 3 stores bytes
        text, encoding = args
        if encoding != "latin1":
            raise DataError(f"it names the encoding {str(encoding)[:20]!r}")
        return _expect(text, str).encode("latin-1")
    return _Call(name, args, [])


def _finished(value: Any) -> Any:
    """The value, or the dict of values, with calls to numpy replaced by their arrays."""
    if isinstance(value, dict):
        return {key: _array(v) if isinstance(v, _Call) else v for key, v in value.items()}
    return _array(value) if isinstance(value, _Call) else value


def _array(call: _Call) -> np.ndarray:
    """The uint8 array that numpy would build from this state."""
    if call.name not in _RECONSTRUCT or len(call.state) != 5:
        raise DataError("an array that is not stored in numpy's way")
    _, shape, dtype, by_columns, content = call.state
    if _expect(dtype, _Call).name != _DTYPE or dtype.args[:1] not in (("u1",), (b"u1",)):
        raise DataError("an array that is not uint8")
    sizes = [_expect(size, int) for size in _expect(shape, tuple)]
    flat = np.frombuffer(_expect(content, bytes), np.uint8)
    if any(size < 0 for size in sizes):
        raise DataError("an array of negative size")
    return flat.reshape(sizes, order="F" if by_columns is True else "C")
