"""The file operations of a real command: recorded by strace, and a kill before any one of them.

    operations = record(command, folder)  # what it did in a folder, in order
    for operation in kill_points(operations):
        restore(folder)
        kill_before(command, operation)  # the same command again, killed as it enters this call

strace sees the calls of every thread and of C code, which a shim of Python's os module does not.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

Kind = Literal["create", "write", "truncate", "fsync", "rename", "link", "unlink", "mkdir"]

CALLS: dict[str, Kind] = {
    "open": "create",
    "openat": "create",
    "creat": "create",
    "write": "write",
    "pwrite64": "write",
    "truncate": "truncate",
    "ftruncate": "truncate",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "link": "link",
    "linkat": "link",
    "unlink": "unlink",
    "unlinkat": "unlink",
    "mkdir": "mkdir",
    "mkdirat": "mkdir",
}
"""System calls that change a folder or its files, and what they do."""
_OPENING = ("open", "openat", "creat")
_UNSUPPORTED = ("writev", "pwritev", "pwritev2", "copy_file_range", "sendfile", "symlinkat")
"""Calls that would change files without being recorded: refused if they occur in the folder."""
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)(.*)")
_UNFINISHED = re.compile(r"(\d+) +(.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
_ARGUMENT = re.compile(r'"[^"]*"(?:\.\.\.)?|[^,"<]*<[^>]*>|\{[^}]*\}|[^,]+')


@dataclass(frozen=True)
class Operation:
    """One change of a folder."""

    kind: Kind
    path: str
    """Relative to the folder; "." is the folder itself."""
    target: str = ""
    """New name of a rename or link."""
    offset: int = 0
    """Where a write begins; size after a truncate."""
    data: bytes = b""
    call: str = ""
    """Name of the system call."""
    nth: int = 0
    """This is the n-th call of that name in its thread, in the folder or elsewhere."""

    def __str__(self) -> str:
        target = f" -> {self.target}" if self.target else ""
        size = f" {len(self.data)} bytes at {self.offset}" if self.kind == "write" else ""
        return f"{self.kind} {self.path}{target}{size}"


@cache
def why_no_strace() -> str:
    """Why commands cannot be traced here; empty if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"strace: {tried.stderr.strip()[:100]}"


def record(
    command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None
) -> list[Operation]:
    """Run a command to its end and return what it changed in a folder, in order."""
    with tempfile.NamedTemporaryFile("r", suffix=".strace", errors="replace") as trace:
        calls = ",".join((*CALLS, *_UNSUPPORTED, "lseek"))
        options = ["-f", "-y", "-xx", "-s", str(2**26), "-e", f"trace=?{calls.replace(',', ',?')}"]
        options += ["-e", "signal=none"]
        subprocess.run(
            ["strace", *options, "-o", trace.name, *command],
            env=_environment(environment),
            check=True,
        )
        return list(_operations(trace, os.path.realpath(folder)))


def kill_points(operations: Iterable[Operation]) -> list[Operation]:
    """The operations that kill_before can single out. Not opening a file: imports do that, too, and
    a kill before the first write leaves the same folder but for an empty temporary file."""
    return [own for own in operations if own.call not in _OPENING]


def kill_before(
    command: Sequence[str],
    operation: Operation,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> bool:
    """Run a command and kill it with SIGKILL as it enters a system call, which is not executed.

    Calls are counted in each thread: the first thread that gets there is the one. Returns True if
    the command was killed, False if it ended before.
    """
    when = f"inject={operation.call}:signal=KILL:when={operation.nth}"
    process = subprocess.Popen(
        ["strace", "-f", "-o", os.devnull, "-e", f"trace={operation.call}", "-e", when, *command],
        env=_environment(environment),
        start_new_session=True,
    )
    try:
        code = process.wait(timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """Without .pyc files, which one run would write and the next one would not."""
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(given or {})}


def _operations(trace: Iterator[str], folder: str) -> Iterator[Operation]:
    counts: Counter[tuple[str, str]] = Counter()
    offsets: dict[str, int] = {}
    appending: set[str] = set()
    for thread, call, arguments, result, rest in _finished_calls(trace):
        counts[thread, call] += 1
        if result < 0:
            continue
        parts = [part.strip() for part in _ARGUMENT.findall(arguments)]
        descriptor = parts[0].partition("<")[0]
        if call == "lseek":
            offsets[descriptor] = result
            continue
        if call in _OPENING:
            opened = str(result)
            offsets[opened] = 0
            appending.discard(opened)
            if "O_APPEND" in arguments:
                appending.add(opened)
        names = [os.path.relpath(path, folder) for path in _paths(call, parts, rest)]
        if not names or names[0].startswith(".."):
            continue
        assert call in CALLS, f"{call} in {names[0]} is not recorded"
        own = Operation(CALLS[call], *names, call=call, nth=counts[thread, call])
        if own.kind == "create":
            if "O_TMPFILE" in arguments or not {"O_CREAT", "O_TRUNC"} & set(
                re.findall(r"O_[A-Z]+", arguments)
            ):
                continue
            yield own
            if "O_TRUNC" in arguments:
                yield replace(own, kind="truncate")
        elif own.kind == "write":
            data = _text(parts[1])[:result]
            if call == "pwrite64":
                yield replace(own, data=data, offset=int(parts[3]))
                continue
            at = -1 if descriptor in appending else offsets.get(descriptor, 0)
            yield replace(own, data=data, offset=at)
            offsets[descriptor] = offsets.get(descriptor, 0) + result
        elif own.kind == "truncate":
            yield replace(own, offset=int(parts[1]))
        else:
            yield own


def _finished_calls(trace: Iterator[str]) -> Iterator[tuple[str, str, str, int, str]]:
    """(thread, call, arguments, result, rest of the line) in the order in which they returned."""
    started: dict[str, str] = {}
    for line in trace:
        if unfinished := _UNFINISHED.match(line):
            started[unfinished[1]] = line.partition(" <unfinished")[0]
            continue
        if resumed := _RESUMED.match(line):
            line = started.pop(resumed[1]) + resumed[2]
        if found := _LINE.match(line.rstrip("\n")):
            thread, call, arguments, result, rest = found.groups()
            yield thread, call, arguments, int(result), rest


def _paths(call: str, parts: list[str], rest: str) -> list[str]:
    """Absolute paths of the files that a call changes."""
    if call in _OPENING:
        return [_path(rest)] if "<" in rest else []
    if call in ("write", "pwrite64", "ftruncate", "fsync", "fdatasync", *_UNSUPPORTED):
        return [_path(parts[0])] if "<" in parts[0] else []
    found, folder = [], os.getcwd()
    for part in parts:
        if "<" in part:
            folder = _path(part)
        elif part.startswith('"'):
            found.append(os.path.join(folder, os.fsdecode(_text(part))))
    return [os.path.join(os.path.realpath(os.path.dirname(p)), os.path.basename(p)) for p in found]


def _path(annotated: str) -> str:
    """The path in 3<\\x2f\\x74...>."""
    content = annotated.partition("<")[2].rpartition(">")[0]
    return os.fsdecode(_text(content.removesuffix("(deleted)")))


def _text(quoted: str) -> bytes:
    return bytes.fromhex("".join(re.findall(r"\\x([0-9a-f]{2})", quoted)))


if __name__ == "__main__":  # FOLDER COMMAND...: print what the command changes in the folder
    for number, found in enumerate(record(sys.argv[2:], Path(sys.argv[1])), 1):
        print(number, found.call, found.nth, found)
