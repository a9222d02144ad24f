"""Run folders of a stranger, for test_hostile_runs.py: each has one thing that is wrong.

By hand, with any number of random ones: python tests/helpers/hostile_runs.py FOLDER COUNT [SEED]
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mutants import png
from PIL import Image
from run_folders import SHAPES, measures, metrics_lines, write_run

Tamper = Callable[[Path], None]

FILES = ("config.json", "summary.json", "metrics.jsonl", "views.png")


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus": -1,
    "zero": 0,
    "huge int": 10**400,
    "huge minus": -(10**400),
    "long": 2**63,
    "large": 2**62,
    "1e308": 1e308,
    "denormal": 5e-324,
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "empty": "",
    "long text": "x" * 20_000,
    "surrogate": "\ud800",
    "escapes": "\x1b[2J\r\n\u202e",
    "nul": "a\0b",
    "markup": '"><script>alert(1)</script>$\\frac{1}{$',
    "object": {"a": {"b": 1}},
    "list": [1, [2], {}],
    "deep": deep(500),
}
SETTINGS = (
    *("views", "kl_weight", "lr", "epochs", "seed", "model", "data", "recipe", "average"),
    *("augment", "crop_area", "betas", "freeze", "normalize", "validation", "compile", "log"),
)
OUTCOME = (
    *("finished", "step", "total_steps", "skipped_steps", "parameters", "best_top1"),
    *("measures", "validation", "timing", "environment"),
    *("measures/top1", "measures/tta_top1", "measures/tta_top1_at_4", "measures/invariance"),
    *("validation/top1", "timing/train_seconds", "timing/views_per_s", "environment/gpu"),
)
RECORD = ("kind", "step", "epoch", "loss", "nll", "kl", "top1", "timing", "invariance")


# --- something else in place of a file ---


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # the path of a socket may have 100 characters
        bound.bind(path.name)
        os.chdir(before)


PLACES: dict[str, Tamper] = {
    "pipe": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a file": lambda path: path.symlink_to("/etc/hostname"),
    "folder": Path.mkdir,
    "socket": _socket,
    "terabyte": lambda path: _sparse(path, 2**40),
    "gigabyte": lambda path: _sparse(path, 2**30),
    "empty file": Path.touch,
    "nesting": lambda path: path.write_text("[" * 100_000),
    "nested objects": lambda path: path.write_text('{"a":' * 50_000),
    "long number": lambda path: path.write_text('{"step": 1' + "0" * 100_000 + "}"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "UTF-16": lambda path: path.write_bytes('{"kind": "eval"}\n'.encode("utf-16")),
    "list": lambda path: path.write_text("[1, 2]"),
    "number": lambda path: path.write_text("1\n"),
    "many keys": lambda path: path.write_text(json.dumps({f"k{i}": i for i in range(20_000)})),
}
PICTURES: dict[str, Tamper] = {
    "bomb": lambda path: path.write_bytes(png((2**30, 2**30), bytes(99))),
    "39 megapixels": lambda path: Image.new("1", (39_000, 1000)).save(path),
    "81 megapixels": lambda path: Image.new("1", (81_000, 1000)).save(path),
    "torn": lambda path: path.write_bytes(png((64, 64), bytes(9))[:40]),
    "no pixels": lambda path: path.write_bytes(png((0, 0), b"")),
    "16 bits": lambda path: Image.new("I;16", (50, 20)).save(path),
    "one pixel wide": lambda path: Image.new("RGB", (1, 30_000)).save(path),
}
LINES: dict[str, bytes] = {
    "numbers": b"1\n" * 1000,
    "blank lines": b"\n" * 1_000_000,
    "one endless line": b"x" * 3_000_000,
    "endless evaluations": b'{"kind": "eval", "step": 1, "epoch": 1, "top1": 0.5}\n' * 50_000,
    "records of a megabyte": (
        b'{"kind": "train", "step": 1, "x": ['
        + b"[]," * 300_000
        + b'1]}\n{"kind": "eval", "step": 2, "epoch": 1}\n'
    )
    * 8,
    "no UTF-8": b'{"kind": "train", "step": 1, "loss": 1, "a": "\xff"}\n',
    "NUL": b"\0" * 100 + b"\n",
    "torn": b'{"kind": "train", "st',
    "other separators": '{"kind": "train",\u2028"step": 1}\n'.encode(),
    "equal keys": b'{"kind": "eval", "step": 1, "epoch": 1, "top1": 1, "top1": {}}\n',
    "backwards": b"".join(
        b'{"kind": "train", "step": %d, "epoch": %d, "loss": 1}\n' % (9 - i, -i) for i in range(9)
    ),
    "extremes": b"".join(
        b'{"kind": "eval", "step": 1, "epoch": %s, "top1": %s}\n' % (value, value)
        for value in (b"1e99", b"-1e99", b"1e-99", b"5e-324", b"1e308", b"NaN", b"0")
    ),
}


def in_place(name: str, tamper: Tamper) -> Tamper:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        tamper(folder / name)

    return apply


def changed(file: str, field: str, value: Any) -> Tamper:
    """A JSON file with another value of a field, or of a field of an object in it."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        *objects, last = field.split("/")
        place = content
        for name in objects:
            place = place[name]
        place[last] = value
        (folder / file).write_text(json.dumps(content))

    return apply


def with_records(field: str, value: Any) -> Tamper:
    """All records with another value of a field."""

    def apply(folder: Path) -> None:
        lines = [json.dumps(record | {field: value}) for record in metrics_lines(4, 0.7)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    return apply


def appended(content: bytes) -> Tamper:
    def apply(folder: Path) -> None:
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(content)

    return apply


def _all_cases() -> Iterator[tuple[str, Tamper]]:
    for file in FILES:
        for name, tamper in PLACES.items():
            yield f"{file}, {name}", in_place(file, tamper)
    for name, tamper in PICTURES.items():
        yield f"views.png, {name}", in_place("views.png", tamper)
    for name, content in LINES.items():
        yield f"metrics.jsonl, {name}", appended(content)
    for value_name, value in VALUES.items():
        for setting in SETTINGS:
            yield f"{setting}, {value_name}", changed("config.json", setting, value)
        for field in OUTCOME:
            yield f"{field}, {value_name}", changed("summary.json", field, value)
        for field in RECORD:
            yield f"record {field}, {value_name}", with_records(field, value)


CASES = dict(_all_cases())
"""Name -> what it does to a good run folder."""


def write_hostile(folder: Path, *tampers: Tamper) -> Path:
    """A finished run with records and a picture, then what is wrong with it."""
    write_run(folder, SHAPES, measures(0.7), measures(0.6), metrics_lines(4, 0.7))
    Image.new("RGB", (240, 30), "teal").save(folder / "views.png")
    for tamper in tampers:
        tamper(folder)
    return folder


def random_value(choose: random.Random) -> Any:
    """A value of any kind, also one that is nearly right."""
    kind = choose.randrange(6)
    if kind == 0:
        return choose.choice([*VALUES.values()])
    if kind == 1:
        return choose.choice((-1, 1)) * 10 ** choose.randrange(0, 320)
    if kind == 2:
        return choose.choice((-1.0, 1.0)) * 10.0 ** choose.randrange(-320, 308)
    if kind == 3:
        return "".join(chr(choose.randrange(0x110000)) for _ in range(choose.randrange(40)))
    if kind == 4:
        return [random_value(choose) for _ in range(choose.randrange(4))]
    return {f"k{i}": random_value(choose) for i in range(choose.randrange(4))}


def random_tamper(choose: random.Random) -> Tamper:
    """Another value of a random field, or damaged bytes anywhere in a file."""
    kind = choose.randrange(4)
    if kind == 0:
        return changed("config.json", choose.choice([*SHAPES.to_flat()]), random_value(choose))
    if kind == 1:
        return changed("summary.json", choose.choice(OUTCOME), random_value(choose))
    if kind == 2:
        return with_records(choose.choice(RECORD), random_value(choose))
    file, damage = choose.choice(FILES), choose.randbytes(choose.randrange(1, 9))
    place = choose.random()

    def damaged(folder: Path) -> None:
        content = (folder / file).read_bytes()
        start = int(place * len(content))
        (folder / file).write_bytes(content[:start] + damage + content[start + len(damage) :])

    return damaged


def write_random(root: Path, count: int, seed: int) -> None:
    choose = random.Random(seed)
    for number in range(count):
        write_hostile(root / f"random-{number}", random_tamper(choose))


if __name__ == "__main__":
    top, number, *rest = sys.argv[1:]
    write_random(Path(top), int(number), int(rest[0]) if rest else 0)
