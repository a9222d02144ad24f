"""A SIMT emulator of NVIDIA PTX in numpy, for checking the values of compiled kernels on a CPU.

    module = ptx_emu.Module(ptx_text)  # NVRTC's nvrtcGetPTX, Triton's kernel.asm["ptx"], nvcc -ptx
    statistics = module.launch("kernel", grid=(g,), block=(b,), args=[array, tensor, 3, 1.5])
    print(statistics)  # instruction counts, traffic, barriers, warnings, races

Arguments. numpy arrays and torch CPU tensors (contiguous) are device pointers and are modified in
place. Ptr(array, byte_offset) points inside of one; None is a null pointer. Numbers follow the type
of the .param; structs by value are bytes. Missing trailing 8-byte parameters are null pointers (the
scratch pointers that Triton appends). For Triton: block=(32 * num_warps,) and
shared_bytes=kernel.metadata.shared.

Execution. Each register is an array over the threads of a batch of blocks. The lowest program
counter runs first, with masks of active threads. A thread waits at bar.sync until all live threads
of its block are there (else BarrierError), and at shfl, vote and other .sync instructions until the
lanes of its member mask are. cp.async data arrive at the wait. schedule="warp" runs one random warp
at a time (seed=...). approx_ulp=1 gives approximate instructions (ex2, lg2, rcp, div.full, ...) a
random error of the documented size; 0 rounds them exactly.

Checks. OutOfBounds and Misaligned name the thread, the PTX line and the instruction. Races in
shared memory within a barrier interval raise RaceError (race="record" collects them in
statistics["races"], None switches the check off; race_mode="strict" also flags accesses that do not
change the value). Unordered accesses to global memory by different threads are only recorded, in
statistics["global_races"]. Shared memory and registers start as 0xFF (NaN), not zero; with
uninitialized="raise", reading shared memory that no thread has written is an UninitializedRead.

Statistics. inst_thread and inst_warp (by opcode), by_class, global (bytes_read and bytes_written as
requested, unique_read and unique_written, 32-byte sectors per request of a warp), params (unique
bytes per array argument), shared, barriers.

Not emulated: wgmma, tcgen05, TMA (cp.async.bulk), mbarrier, clusters, textures, sparse and integer
mma, recursion (calls are inlined), b128. ptxas may fuse mul.f32 and add.f32 without rounding
modifiers into an fma; here each is rounded.
"""

from .buffers import Buffer, Ptr
from .errors import (
    BarrierError,
    Misaligned,
    OutOfBounds,
    ParseError,
    PTXError,
    RaceError,
    StepLimit,
    Trap,
    UninitializedRead,
    UnknownInstruction,
)
from .launch import Launch
from .module import Module
from .program import Program
from .stats import Stats
from .types import SLOT, slot_base

__all__ = [
    "SLOT",
    "BarrierError",
    "Buffer",
    "Launch",
    "Misaligned",
    "Module",
    "OutOfBounds",
    "PTXError",
    "ParseError",
    "Program",
    "Ptr",
    "RaceError",
    "Stats",
    "StepLimit",
    "Trap",
    "UninitializedRead",
    "UnknownInstruction",
    "slot_base",
]
