"""What is on a disk after a power cut: a model of files, names, fsync and crashes.

A crash keeps what an fsync has made durable, and any part of what came after:

- data of a file since its last fsync: none, all, a torn beginning, or zeros of the final length;
- names in a folder since its last fsync: any subset of the creates, renames, links and unlinks,
  each of which is atomic. fsync of a file does not make its name durable.

That is weaker than ext4 or XFS, which keep the order of names: what survives here survives there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path, PurePosixPath

from file_operations import Operation

Tree = Mapping[str, bytes | None]
"""Path -> content of a file; None: a folder."""
MOST_PENDING = 10
"""Changes of one folder between two fsyncs, of which all subsets are tried."""


@dataclass
class _File:
    durable: bytes = b""
    current: bytes = b""

    def after_crash(self) -> list[bytes]:
        """What it may contain."""
        if self.durable == self.current:
            return [self.current]
        kept = len(self.durable) if self.current.startswith(self.durable) else 0
        new = len(self.current) - kept
        torn = self.current[: kept + new // 2]
        zeros = self.current[:kept] + bytes(new)
        return list(dict.fromkeys((self.durable, self.current, torn, zeros)))


@dataclass
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[dict[str, _File | _Folder | None]] = field(default_factory=list)
    """Changes since the last fsync: name -> what it names, None: removed."""

    @property
    def current(self) -> dict[str, _File | _Folder]:
        return _changed(self.durable, self.pending)

    def after_crash(self) -> Iterator[dict[str, _File | _Folder]]:
        assert len(self.pending) <= MOST_PENDING, "too many changes without an fsync of the folder"
        for count in range(len(self.pending) + 1):
            for kept in combinations(self.pending, count):
                yield _changed(self.durable, kept)


def _changed(
    names: Mapping[str, _File | _Folder], changes: Iterable[Mapping[str, _File | _Folder | None]]
) -> dict[str, _File | _Folder]:
    found = dict(names)
    for change in changes:
        for name, own in change.items():
            if own is None:
                found.pop(name, None)
            else:
                found[name] = own
    return found


class Disk:
    """The files below a folder, whose own name is durable, while operations are applied."""

    def __init__(self) -> None:
        self._root = _Folder()

    def apply(self, operation: Operation) -> None:
        kind, path = operation.kind, operation.path
        if kind == "fsync":
            own = self._find(path)
            if isinstance(own, _File):
                own.durable = own.current
            else:
                own.durable, own.pending = own.current, []
            return
        if path == ".":
            return  # made by the command; its own name is taken for durable
        folder, name = self._folder_of(path), PurePosixPath(path).name
        if kind == "create":
            if name not in folder.current:
                folder.pending.append({name: _File()})
        elif kind == "mkdir":
            folder.pending.append({name: _Folder()})
        elif kind == "unlink":
            folder.pending.append({name: None})
        elif kind == "rename":
            target = PurePosixPath(operation.target)
            assert self._folder_of(operation.target) is folder, "a rename within one folder"
            folder.pending.append({target.name: folder.current[name], name: None})
        elif kind == "link":
            target = PurePosixPath(operation.target)
            self._folder_of(operation.target).pending.append({target.name: folder.current[name]})
        else:
            self._change_data(operation)

    def _change_data(self, operation: Operation) -> None:
        own = self._find(operation.path)
        assert isinstance(own, _File)
        if operation.kind == "truncate":
            own.current = own.current[: operation.offset].ljust(operation.offset, b"\0")
            return
        start = len(own.current) if operation.offset < 0 else operation.offset
        end = start + len(operation.data)
        before = own.current[:start].ljust(start, b"\0")
        own.current = before + operation.data + own.current[end:]

    def _folder_of(self, path: str) -> _Folder:
        own = self._find(str(PurePosixPath(path).parent))
        assert isinstance(own, _Folder)
        return own

    def _find(self, path: str) -> _File | _Folder:
        own: _File | _Folder = self._root
        for name in PurePosixPath(path).parts:
            assert isinstance(own, _Folder)
            own = own.current[name]
        return own

    def tree(self) -> Tree:
        """What a process sees, also after a kill: the kernel is still there."""
        return next(_trees(self._root, "", crashed=False))

    def after_power_cut(self) -> Iterator[Tree]:
        """All that a new start may find."""
        return _trees(self._root, "", crashed=True)


def _trees(folder: _Folder, prefix: str, *, crashed: bool) -> Iterator[Tree]:
    for names in folder.after_crash() if crashed else [folder.current]:
        choices: list[list[Tree]] = []
        for name, own in names.items():
            path = f"{prefix}{name}"
            if isinstance(own, _Folder):
                below = _trees(own, f"{path}/", crashed=crashed)
                choices.append([{path: None, **tree} for tree in below])
            else:
                contents = own.after_crash() if crashed else [own.current]
                choices.append([{path: content} for content in contents])
        for chosen in product(*choices):
            yield {path: content for tree in chosen for path, content in tree.items()}


def crash_states(operations: Sequence[Operation]) -> Iterator[tuple[int, Tree]]:
    """(number of operations done, what is left): after a kill and after a power cut at any point.

    Each combination once.
    """
    disk, seen = Disk(), set[tuple[int, int]]()
    for done in range(len(operations) + 1):
        for tree in (disk.tree(), *disk.after_power_cut()):
            key = done, hash(frozenset(tree.items()))
            if key not in seen:
                seen.add(key)
                yield done, tree
        if done < len(operations):
            disk.apply(operations[done])


def write_tree(tree: Tree, folder: Path) -> None:
    """Make a new folder with this content."""
    folder.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir(exist_ok=True)
        else:
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(content)


# --- the protocol, without its code ---


def protocol(saves: int, *, keep: int = 2, best: Sequence[int] = (2, 4)) -> list[Operation]:
    """The order of writes of a run that saves after every step: step numbers are the contents.

    A record of metrics.jsonl is its step and a line break; a checkpoint holds its step and, if it
    counts an evaluation, that of the best one. "reported" tells when a save was complete.
    """
    found = [Operation("mkdir", "run"), Operation("fsync", ".")]
    found += [Operation("create", "run/metrics"), Operation("fsync", "run")]
    for step in range(1, saves + 1):
        found.append(Operation("write", "run/metrics", offset=-1, data=b"%d\n" % step))
        found.append(Operation("fsync", "run/metrics"))
        newest_best = max((own for own in best if own <= step), default=0)
        content = b"<%d,%d>" % (step, newest_best)
        if step in best:
            found += _atomic("run/best", content)
        if step == 1:
            found.append(Operation("mkdir", "run/kept"))
        found += _atomic(f"run/kept/{step}", content)
        found.append(Operation("link", f"run/kept/{step}", "run/last.tmp"))
        found += [
            Operation("fsync", "run/last.tmp"),
            Operation("rename", "run/last.tmp", "run/last"),
        ]
        found.append(Operation("fsync", "run"))
        found += [Operation("create", f"reported-{step}"), Operation("fsync", ".")]
        if step > keep:
            found.append(Operation("unlink", f"run/kept/{step - keep}"))
    return found


def _atomic(path: str, content: bytes) -> list[Operation]:
    temporary, folder = f"{path}.tmp", str(PurePosixPath(path).parent)
    return [
        Operation("create", temporary),
        Operation("write", temporary, data=content),
        Operation("fsync", temporary),
        Operation("rename", temporary, path),
        Operation("fsync", folder),
    ]


def violations_of_model(tree: Tree) -> list[str]:
    """What is wrong with a state of the model after a crash."""
    reported = max((int(n.partition("-")[2]) for n in tree if n.startswith("reported")), default=0)
    found: list[str] = []
    steps: dict[int, int] = {}
    best_step = 0
    for path, content in tree.items():
        is_final = path in ("run/last", "run/best") or path.startswith("run/kept/")
        if content is None or not is_final or path.endswith(".tmp"):
            continue
        if (numbers := re.fullmatch(rb"<(\d+),(\d+)>", content)) is None:
            found.append(f"{path} is half-written")
        elif path == "run/best":
            best_step = int(numbers[1])
        else:
            steps[int(numbers[1])] = int(numbers[2])
    newest = max(steps, default=0)
    if newest < reported:
        found.append(f"step {reported} was saved, and {newest} is left")
    lines = (tree.get("run/metrics") or b"").split(b"\n")[:-1]
    kept = [int(line) for line in lines if line.isdigit() and int(line) <= newest]
    if kept != list(range(1, newest + 1)):
        found.append(f"records {kept} at step {newest}")
    if best_step < steps.get(newest, 0):
        found.append(f"the best is of {best_step}, and step {newest} counts {steps[newest]}")
    return found
