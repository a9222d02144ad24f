"""Targets that read checkpoints, exports, run folders, settings and plans of views."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2
import numpy as np
import torch
from checksums import sign_zip
from color_folders import write_folder
from run_folders import SHAPES, measures, metrics_lines, write_run
from target import Target, join, scratch_folder, split, write
from training import tiny_config

import fastaug
from fastaug import report, train
from fastaug.engine.trainer import Trainer
from fastaug.errors import FastaugError
from fastaug.experiments import report_page
from fastaug.exporters.loading import load_network
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runs.config_file import ConfigFile
from fastaug.runs.defaults import defaults
from fastaug.runs.folder import RunFolder
from fastaug.runs.initial_weights import settings_of_weights
from fastaug.runs.weights import weights_as_safetensors
from fastaug.views.plan import ViewPlans

CPU = torch.device("cpu")


def each(*uses: Callable[[], object]) -> None:
    """Try several uses of a file: one that refuses it does not hide the others."""
    errors = []
    for use in uses:
        try:
            use()
        except FastaugError as error:
            errors.append(error)
    if errors:
        raise errors[0]


# --- checkpoints ---

LABEL = b"fastaug sha256 "


@cache
def trainer() -> Trainer:
    """A training of small images that loads one state after the other."""
    with scratch_folder() as folder:
        data = write_folder(folder / "data", {"train": 4, "test": 1}, size=16)
        changes = {"batch_size": 4, "epochs": 1, "kernel": "reference"}
        return Trainer(tiny_config(data, folder / "run", **changes))


@cache
def saved_state() -> dict[str, Any]:
    return {"format": 3, "version": fastaug.__version__, **trainer().state_dict()}


def archive_of(state: object) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


@cache
def saved_members() -> dict[str, bytes]:
    """The files in the archive of a checkpoint."""
    with zipfile.ZipFile(io.BytesIO(archive_of(saved_state()))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


PICKLE = "archive/data.pkl"


def with_pickle(content: bytes) -> bytes:
    """The archive of a checkpoint, with another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, own in (saved_members() | {PICKLE: content}).items():
            archive.writestr(zipfile.ZipInfo(name), own)
    return out.getvalue()


def sign_checkpoint(archive: bytes) -> bytes:
    """The archive with its checksum as its comment, as fastaug writes it."""
    content = archive[:-2] + bytes(2)
    comment = LABEL + hashlib.sha256(content).hexdigest().encode()
    return content[:-2] + len(comment).to_bytes(2, "little") + comment


def use_checkpoint(archive: bytes, folder: Path) -> None:
    """What fastaug.predict and a resumed training do with a file."""
    path = write(folder / "last.pt", sign_checkpoint(archive))
    each(lambda: load_network(str(path), CPU), lambda: resume(path))


def resume(path: Path) -> None:
    defaults(recipe="", resume=str(path), out="", data="", config="")
    trainer().load_state_dict(load_checkpoint(path), str(path))


def read_pickle(content: bytes, folder: Path) -> None:
    use_checkpoint(with_pickle(content), folder)


def pickle_seeds(_: Path) -> list[bytes]:
    return [saved_members()[PICKLE]]


def read_archive(content: bytes, folder: Path) -> None:
    """A small archive that is not that of a network."""
    load_checkpoint(write(folder / "last.pt", sign_checkpoint(sign_zip(content))))


def archive_seeds(_: Path) -> list[bytes]:
    state = {"format": 3, "config": {}, "classes": ["a", "b"], "model": {"w": torch.ones(2)}}
    return [archive_of(state | {"ema": None, "step": 1})]


DELETED = object()
VALUES: tuple[Any, ...] = (
    *(DELETED, None, True, -1, 0, 1, 2**31, 2**70, 1e308, float("nan"), "", "x" * 5000, "\x1b[2J"),
    *([], {}, [[]], {"a": 1}, [None], (1, 2), ["a", "b", "c"], "auto", "timm/resnet18"),
    *("wrn-1000000-1", "wrn-10-20000", "wrn-16-2", "nf_resnet26", "none", "adamw", "randaugment"),
    *(torch.ones(()), torch.ones(3), torch.ones(2, 2), torch.ones(0), torch.ones(3).bool()),
    *(torch.ones(1).expand(2**40), torch.full((3,), float("nan")), torch.ones(3).to_sparse()),
    *(10**400, 0.5, -0.5, [0.0, 0.0, 0.0], [1, [2, [3, [4]]]]),
)
"""What replaces a value of a checkpoint."""


def edited_state(program: bytes) -> dict[str, Any]:
    """A checkpoint in which the bytes have replaced some values: for each of them how deep it is,
    which one of its dictionary or list, and the new value."""
    state = copy.deepcopy(saved_state())
    numbers = iter(program)
    for depth in numbers:
        holder: Any = None
        key: Any = None
        inner: Any = state
        for _ in range(1 + depth % 4):
            if not isinstance(inner, (dict, list)) or not inner:
                break
            holder = inner
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            key = keys[next(numbers, 0) % len(keys)]
            inner = holder[key]
        value = VALUES[next(numbers, 0) % len(VALUES)]
        if holder is None:
            break
        if value is DELETED:
            del holder[key]
        else:
            holder[key] = value
    return state


def read_edited(content: bytes, folder: Path) -> None:
    use_checkpoint(archive_of(edited_state(content)), folder)


# --- exports, weights of other programs ---


@cache
def exported() -> tuple[bytes, bytes]:
    """Header and tensors of an export."""
    content = weights_as_safetensors(saved_state())
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]


def read_export(content: bytes, folder: Path) -> None:
    """A header with its right length, before sound tensors."""
    data = len(content).to_bytes(8, "little") + content + exported()[1]
    path = write(folder / "x.safetensors", data)
    each(
        lambda: load_network(str(path), CPU),
        lambda: settings_of_weights(tiny_config(path, folder, weights=str(path))),
    )


def read_weights(content: bytes, folder: Path) -> None:
    path = write(folder / "x.pth", sign_zip(content))
    settings_of_weights(tiny_config(path, folder, weights=str(path)))


def weights_seeds(_: Path) -> list[bytes]:
    state = {"state_dict": {"w": torch.ones(2, 3), "b": torch.ones(2)}, "epoch": 1}
    out = io.BytesIO()
    torch.save(state, out, _use_new_zipfile_serialization=False)
    return [archive_of(state), out.getvalue()]


# --- run folders ---

RUN_FILES = ("config.json", "summary.json", "metrics.jsonl")


class Templates(jinja2.BytecodeCache):
    """Compiled templates: compiling one takes longer than all else that the report does."""

    def __init__(self) -> None:
        self._compiled: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Any) -> None:
        if bucket.key in self._compiled:
            bucket.bytecode_from_string(self._compiled[bucket.key])

    def dump_bytecode(self, bucket: Any) -> None:
        self._compiled[bucket.key] = bucket.bytecode_to_string()


compiled_once = partial(jinja2.Environment, bytecode_cache=Templates())


def read_run(content: bytes, folder: Path) -> None:
    """What fastaug.report and a resumed run make of a run folder."""
    for name, own in zip(RUN_FILES, split(content, 3), strict=True):
        if own:
            write(folder / "run" / name, own)
    out = ["--out", str(folder / "report.html")]
    metrics = folder / "run/metrics.jsonl"
    resumed = RunFolder(tiny_config(folder, folder / "run"), say=lambda _: None)
    with (
        redirect_stdout(io.StringIO()),
        mock.patch.object(report_page, "Environment", compiled_once),
    ):
        each(
            lambda: report.main([str(folder), *out]),
            lambda: resumed._keep_metrics_until(metrics, 50, 1),
        )


def run_seeds(folder: Path) -> list[bytes]:
    config = SHAPES.replace(views=4, kl_weight=1.0)
    lines = metrics_lines(2, 0.5)
    made = write_run(folder / "run", config, measures(0.5), measures(0.4), lines)
    files = [(made / name).read_bytes() for name in RUN_FILES]
    return [join(*files), join(files[0], b"", files[2])]


# --- settings ---


def settings_of(words: list[str], folder: Path) -> None:
    """The settings of a command line; paths in it start in the folder."""
    with chdir(folder), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            train.read_settings(words)
        except SystemExit as error:
            if error.code:  # 0: --help
                raise


def config_target(name: str, *seeds: bytes) -> Target:
    """A config file of this name. The flags that it means are made from all inputs, and parsed from
    one of eight: parsing takes 100 times as long."""

    def read(content: bytes, folder: Path) -> None:
        file = write(folder / name, content)
        ConfigFile(str(file)).flags()
        if zlib.crc32(content) % 8 == 0:
            settings_of(["--config", str(file)], folder)

    return Target(read, lambda _: seeds, slow=True)


def read_flags(content: bytes, folder: Path) -> None:
    """A word on each line."""
    settings_of(content.decode("utf-8", "surrogateescape").split("\n"), folder)


YAML = (
    b"views: 8\nlr: 0.1\ndata: x\n",
    b"view: {views: 4, size: 16:32}\noptim:\n  nesterov: false\n  lr: 1e-3\nlog: [tensorboard]\n",
    b"normalize: [[0.5, 0.4, 0.3], [1, 1, 1]]\nrecipe: shapes\ndali: true\n",
)
FLAGS = (
    b"--data\nx\n--views\n8\n--lr=0.1\n--size\n16:32",
    b"--recipe\nshapes\n--dali\n--no-nesterov\n--normalize\n0.5,0.4,0.3\n1,1,1\n--compile",
    b"--help",
)

# --- plans of views ---


def read_plan(content: bytes, _: Path) -> None:
    """Any numbers as the plan of two views of two images."""
    numbers = np.frombuffer(content.ljust(160, b"\0")[:160], np.int32)
    boxes, rest = numbers[:16].reshape(2, 2, 4), numbers[16:]
    plan = ViewPlans(
        boxes=boxes,
        flips=rest[:4].reshape(2, 2) % 2 == 1,
        operations=rest[4:8].reshape(2, 2, 1),
        arguments=np.repeat(rest[8:16].view(np.float64), 4).reshape(2, 2, 1, 4),
        size=int(rest[16]) % 40,
    )
    images = [torch.zeros(9, 7, 3, dtype=torch.uint8), torch.full((5, 11, 3), 9, dtype=torch.uint8)]
    # A box of 180 megapixels is allowed: it would take a second and 540 MB.
    if (np.abs(boxes[..., 2:].astype(np.int64)).prod(-1) > 2**20).any():
        return
    views = fastaug.make_views(images, plan, antialias=bool(rest[17] & 1), threads=1)
    assert torch.isfinite(views).all()


def plan_seeds(_: Path) -> list[bytes]:
    boxes = [(0, 0, 5, 7), (-2, 1, 30, 20)] * 2
    arguments = np.array([0.5, 3, -1e9, 20]).tobytes()
    seeds = []
    for operation in range(0, 16, 4):
        numbers = [*np.ravel(boxes), 0, 1, 0, 1, *range(operation, operation + 4)]
        seeds.append(np.array(numbers, np.int32).tobytes() + arguments + b"\x10\0\0\0\1\0\0\0")
    return seeds


RUN_TARGETS = {
    "config-yaml": config_target("x.yaml", *YAML),
    "config-json": config_target("config.json", json.dumps(SHAPES.to_flat()).encode()),
    "flags": Target(read_flags, lambda _: FLAGS, 512, slow=True),
    "run-folder": Target(read_run, run_seeds, slow=True),
    "checkpoint-fields": Target(read_edited, lambda _: [b"", bytes(range(12))], 32, slow=True),
    "checkpoint-pickle": Target(read_pickle, pickle_seeds, 2**14, slow=True),
    "checkpoint-zip": Target(read_archive, archive_seeds),
    "export": Target(read_export, lambda _: [exported()[0]], 2**13, slow=True),
    "weights": Target(read_weights, weights_seeds),
    "view-plan": Target(read_plan, plan_seeds, 160),
}
