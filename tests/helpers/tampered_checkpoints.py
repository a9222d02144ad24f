"""Checkpoints with one wrong field and a right checksum, and what the commands make of them.

    python tests/helpers/tampered_checkpoints.py [--every N]

tries all of them (or every N-th) with evaluate, resume, export and --weights, each in a process of
its own, and lists those that did not end well: a result, or one line of a FastaugError, within
SECONDS and BYTES.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from color_folders import write_folder
from training import run, tiny_config

from fastaug import cli, evaluate, export, train
from fastaug.engine.trainer import Trainer
from fastaug.errors import FastaugError, printable
from fastaug.runs.checkpoint import write_checkpoint

SECONDS, BYTES = 5.0, 600 * 2**20
"""Limits of one case: time of the processor, and memory beyond that of the start."""
_PATIENCE = 60.0
"""Seconds after which a case counts as a hang."""
DELETED = "deleted"
_CHILDREN = 3
"""Entries of a dictionary with many of one kind (tensors, parameters) that are tampered with."""

State = dict[str, Any]
KeyPath = tuple[Any, ...]


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: dict[str, Any] = {
    "none": None,
    "negative": -1,
    "huge": 2**70,
    "large": 10**9,
    "float": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "empty text": "",
    "long text": "x" * 1000,
    "odd text": "~nobody\0\x1b[31m\n",
    "empty list": [],
    "empty dict": {},
    "list of everything": [None, "x", 1, {}],
    "integer keys": {0: 1, 1: {}},
    "nested": _nested(5000),
    "bool": True,
    "tensor": torch.zeros(2, 3),
    "integer tensor": torch.zeros((), dtype=torch.int64),
    "complex tensor": torch.zeros(4, dtype=torch.complex64),
    "expanded tensor": torch.zeros(1).expand(2**40),
}
_MODELS = ("wrn-1000000-1", "wrn-9994-1", "wrn-10-20000", "wrn-10-9999", "wrn-10-0", "wrn-11-1")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "model": (*_MODELS, "timm/vit_giant_patch14_dinov2", "timm/hf-hub:x/y", "nf_resnet101"),
    "views": (10**9, 16), "size": (10**9, 8192, 9), "batch_size": (2**40, 2**20),
    "workers": (10**6,), "tta": (10**9, 10**6), "eval_views": (10**9,), "epochs": (10**9, 1),
    "initial_size": (8, 10**9), "accumulate": (10**9,), "crop_area": ([1e400, 1], [0.5]),
    "betas": ([0.9, "x"], [10**400, 0]), "normalize": ([10**400, 0.5], [[1, 2], 3], "x" * 10**6),
    "lr": (10**400,), "freeze": ([1], ["x" * 1000]), "log": ([1], ["tensorboard"] * 1000),
    "data": ("/dev/zero", "x" * 10**5, "s3://user:password@bucket/x"), "out": ("/proc/x",),
    "weights": ("/dev/zero",), "device": ("cuda:99", "meta", "cpu:x"), "recipe": ("../../up",),
    "kernel": ("os:system",), "precision": ("fp64",), "prefetch": (10**9,), "loader": ("dali",),
    "decode_memory": (10**9,), "cache_size": (1e300,), "stall_timeout": (1e300,),
    "train_images": (10**12,), "max_steps": (10**18,), "dropout": (0.9,), "ema": (0.5,),
    "optimizer": ("adamw", "muon"), "compile": ([],), "progress_every": (1e300,),
}  # fmt: skip
"""Values of the right kind that ask for too much, or for something else."""


class Tampered(NamedTuple):
    """One field of a checkpoint with another value."""

    path: KeyPath
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{'/'.join(map(str, self.path))} = {self.name}"

    def applied(self, state: State) -> State:
        """The state with this change; the original stays as it is."""
        state = copy.copy(state)
        owner: Any = state
        for key in self.path[:-1]:
            owner[key] = copy.copy(owner[key])
            owner = owner[key]
        if self.value is DELETED:
            del owner[self.path[-1]]
        else:
            owner[self.path[-1]] = self.value
        return state


def cases(state: State) -> Iterator[Tampered]:
    """Every key of a checkpoint, at any depth, with every value, deleted, and with a new key."""
    for path, value in _walk(state, ()):
        for name, other in VALUES.items():
            yield Tampered(path, name, other)
        yield Tampered(path, "deleted", DELETED)
        if isinstance(value, dict):
            yield Tampered((*path, "new key"), "new", "value")
        if isinstance(value, torch.Tensor):
            yield Tampered(path, "more rows", torch.cat([value[None], value[None]]))
            yield Tampered(path, "double", value.double() if value.is_floating_point() else value)
            yield Tampered(path, "other shape", value.reshape(-1)[:1])
    for name, values in SETTINGS.items():
        for number, other in enumerate(values):
            yield Tampered(("config", name), f"setting {number}", other)


def _walk(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if path:
        yield path, value
    if isinstance(value, dict):
        keys = list(value)
        is_many = len({type(own) for own in value.values()}) == 1 and len(keys) > _CHILDREN
        for key in [*keys[: _CHILDREN - 1], keys[-1]] if is_many else keys:
            yield from _walk(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value))[: _CHILDREN - 1]:
            yield from _walk(value[index], (*path, index))


@dataclass
class Scene:
    """A run that was stopped at step 6 of 8, and a place for copies of its checkpoint."""

    folder: Path
    state: State

    @classmethod
    def build(cls, folder: Path, **settings: Any) -> Scene:
        data = write_folder(folder / "data", {"train": 12, "test": 5})
        config = tiny_config(data, folder / "run", log=("none",), **{"tta": 1, **settings})
        begun = run(config.replace(max_steps=6))
        state = torch.load(begun / "last.pt", weights_only=True)
        state["config"]["max_steps"] = 0
        return cls(folder, {k: v for k, v in state.items() if k not in ("format", "version")})

    def write(self, state: State) -> Path:
        place = self.folder / "tampered"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(100_000)
        write_checkpoint(place / "last.pt", state)
        sys.setrecursionlimit(limit)
        return place / "last.pt"


def evaluated(path: Path) -> str:
    out = path.with_suffix(".json")
    code = cli.run(evaluate.main, [str(path), "--out", str(out)])
    return _json_of(out, "measures") if code == 0 else ""


def exported(path: Path) -> str:
    return "written" if cli.run(export.main, [str(path), "--to", "safetensors"]) == 0 else ""


def resumed(path: Path) -> str:
    config, checkpoint = train.configure(["--resume", str(path.parent)])
    return _without_timing(Trainer(config, checkpoint).fit())


def started(path: Path) -> str:
    """A new run from the weights, up to its first step."""
    words = ["--weights", str(path), "--out", str(path.parent / "new"), "--max-steps", "1"]
    words += ["--data", str(path.parent.parent / "data"), "--size", "16", "--log", "none"]
    config, _ = train.configure([*words, "--workers", "0", "--views", "2", "--batch-size", "16"])
    return _without_timing(Trainer(config).fit())


def _without_timing(summary: dict[str, Any]) -> str:
    return json.dumps(summary["measures"], sort_keys=True)


def _json_of(file: Path, key: str) -> str:
    return json.dumps(json.loads(file.read_text())[key], sort_keys=True)


COMMANDS: dict[str, Callable[[Path], str]] = {
    "evaluate": evaluated, "resume": resumed, "export": exported, "weights": started,
}  # fmt: skip


class Outcome(NamedTuple):
    """What became of a command. kind: a result, an error, or what went wrong."""

    kind: str
    text: str
    seconds: float = 0.0
    bytes: int = 0

    @property
    def is_good(self) -> bool:
        return (
            self.kind in ("result", "error")
            and self.seconds <= SECONDS
            and self.bytes <= BYTES
            and "\n" not in self.text
        )

    def __str__(self) -> str:
        return f"{self.kind} in {self.seconds:.1f} s, {self.bytes >> 20} MiB: {self.text[:200]}"


def outcome(command: Callable[[Path], str], path: Path) -> Outcome:
    """Run a command in a child process, which is killed if it takes too long or too much memory."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    started_at = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setsid()
        os.write(writer, pickle.dumps(_tried(command, path))[:60_000])
        os._exit(0)
    os.close(writer)
    content = b""
    while time.monotonic() - started_at < _PATIENCE:
        ready = os.waitpid(child, os.WNOHANG)[0]
        if ready:
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    if not content:
        return Outcome("hang or crash", "", time.monotonic() - started_at)
    return pickle.loads(content)


def _tried(command: Callable[[Path], str], path: Path) -> Outcome:
    before = _resident()
    limit = _address_space() + 4 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    started_at, out = time.process_time(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(out):
            kind, text = "result", command(path)
        if not text:
            kind, text = "error", _error_line(out.getvalue())
    except FastaugError as error:
        kind, text = "error", printable(str(error))  # as cli.run prints it
    except BaseException as error:  # what the tests are to find
        kind, text = "traceback", f"{type(error).__name__}: {error}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Outcome(kind, text[:20_000], time.process_time() - started_at, max(0, peak - before))


def _error_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("error: ")), text)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--command", choices=COMMANDS, default=None)
    options = parser.parse_args()
    os.environ["FASTAUG_CACHE"] = tempfile.mkdtemp()
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        scene = Scene.build(Path(folder))
        for name, command in COMMANDS.items():
            if options.command in (None, name):
                bad += _report(name, command, scene, options.every)
    return bool(bad)


def _report(name: str, command: Callable[[Path], str], scene: Scene, every: int) -> int:
    expected = outcome(command, scene.write(scene.state))
    assert expected.kind == "result", expected
    counts: Counter[str] = Counter()
    bad = 0
    for case in list(cases(scene.state))[::every]:
        found = outcome(command, scene.write(case.applied(scene.state)))
        kind = found.kind
        if kind == "result":
            kind = "equal result" if found.text == expected.text else "other result"
        counts[kind] += 1
        if not found.is_good:
            bad += 1
            print(f"{name}: {case}: {found}", flush=True)
    print(f"{name}: {sum(counts.values())} cases, {bad} bad; {dict(counts)}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
