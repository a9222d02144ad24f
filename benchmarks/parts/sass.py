"""Machine code of CUDA kernels, as nvdisasm prints it (pip install nvidia-cuda-nvdisasm)."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

PACKAGE = "nvidia-cuda-nvdisasm"


class Instruction(NamedTuple):
    opcode: str
    """With its modifiers: LDG.E.128."""
    label: str
    """Where a branch goes to; empty for other instructions."""

    @property
    def operation(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def bits(self) -> int:
        """Width of a load or store."""
        found = re.search(r"\.[US]?(8|16|64|128)\b", self.opcode)
        return int(found[1]) if found else 32

    @property
    def is_fp64(self) -> bool:
        return bool(re.match(r"D[A-Z]|MUFU\.\w*64|(F2F|F2I|I2F|FRND)\b.*F64", self.opcode))


class Code(NamedTuple):
    """One kernel."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """Label -> number of the instruction that follows it."""

    def count(self, *operations: str, bits: int | None = None) -> int:
        return sum(
            one.operation in operations and bits in (None, one.bits) for one in self.instructions
        )

    def widths(self, *operations: str) -> dict[int, int]:
        """Bits of loads or stores -> how many there are, wide ones first."""
        found = Counter(one.bits for one in self.instructions if one.operation in operations)
        return dict(sorted(found.items(), reverse=True))

    @property
    def fp64(self) -> int:
        return sum(one.is_fp64 for one in self.instructions)

    def inner_loops(self) -> list[tuple[Instruction, ...]]:
        """Loops that have no other loop in them: from the target of a branch back to the branch."""
        ranges = {
            (self.labels[one.label], place)
            for place, one in enumerate(self.instructions)
            if one.label in self.labels and self.labels[one.label] < place
        }
        return [
            self.instructions[first : last + 1]
            for first, last in sorted(ranges)
            if not any(
                (begin, end) != (first, last) and first <= begin and end <= last
                for begin, end in ranges
            )
        ]


@cache
def disassembler() -> str | None:
    """Path of nvdisasm: of the package, or installed with CUDA."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return shutil.which("nvdisasm")
    return next(str(file.locate()) for file in files if file.name == "nvdisasm")


def disassemble(image: bytes) -> Code:
    """The machine code of an image with one kernel."""
    program = disassembler()
    assert program is not None, f"pip install {PACKAGE}"
    with tempfile.TemporaryDirectory(prefix="fastaug-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(image)
        done = subprocess.run([program, "-c", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def parse(text: str) -> Code:
    """text: what nvdisasm prints."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    pattern = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := pattern.search(line):
            target = re.search(r"`\((\.L_\w+)\)", found[2]) if "BRA" in found[1] else None
            instructions.append(Instruction(found[1], target[1] if target else ""))
    return Code(tuple(instructions), labels)
