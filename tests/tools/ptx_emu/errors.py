"""What a kernel or a PTX text can do wrong."""

from __future__ import annotations


class PTXError(Exception):
    pass


class ParseError(PTXError):
    pass


class UnknownInstruction(PTXError, NotImplementedError):
    pass


class OutOfBounds(PTXError):
    pass


class Misaligned(PTXError):
    pass


class BarrierError(PTXError):
    pass


class RaceError(PTXError):
    pass


class UninitializedRead(PTXError):
    pass


class StepLimit(PTXError):
    pass


class Trap(PTXError):
    pass
