"""A /dev/shm that is tiny, full, filled during a run, or missing: the torch loader works.

The cases run in a child with its own mounts (unshare -m), which may replace its /dev/shm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

SECONDS = 200
"""Far more than the ten that it takes: a hang, not slowness, is what fails."""
START_METHODS = ("fork", "forkserver")


def can_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run(command, capture_output=True).returncode
    )


pytestmark = pytest.mark.skipif(not can_mount(), reason="mount namespaces are not allowed")


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("shm")
    environment = os.environ | {"FASTAUG_CACHE": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "-m", sys.executable, __file__, str(folder), str(work)],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("case", ["tiny", "tiny, batches held", "filled during a pass"])
def test_workers_do_not_need_it(case: str, method: str, results: dict[str, Any]) -> None:
    found = results[f"{case}, {method}"]
    assert found["equal"]
    assert found["workers"] == 1
    assert found["warnings"] == []


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("case", ["full", "missing"])
def test_without_it_the_trainer_decodes(case: str, method: str, results: dict[str, Any]) -> None:
    found = results[f"{case}, {method}"]
    assert found["equal"]
    assert found["workers"] == 0
    (line,) = found["warnings"]
    assert "/dev/shm" in line
    assert "--shm-size" in line


# --- the child ---


def all_cases(data: Path, work: Path) -> dict[str, Any]:
    import logging
    import multiprocessing

    import torch
    from training import tiny_config

    import fastaug

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastaug").addHandler(handler)
    # A batch of views is 393 KB, more than there is in the tiny one.
    settings: dict[str, Any] = {"loader": "torch", "batch_size": 8, "size": 64}
    without = tiny_config(data, work / "run", workers=0, **settings)
    with_workers = tiny_config(data, work / "run", workers=1, **settings)
    expected = [batch.views.clone() for batch in fastaug.build_loader(without)]
    assert expected[0].nbytes > 300_000

    def case(held: bool, during: bool) -> dict[str, Any]:
        messages.clear()
        views: list[torch.Tensor] = []
        workers = 0
        for batch in fastaug.build_loader(with_workers):
            if during and not views:
                fill()
            views.append(batch.views if held else batch.views.clone())
            workers = max(workers, len(multiprocessing.active_children()))
        equal = len(views) == len(expected) and all(map(torch.equal, views, expected))
        return {"equal": equal, "workers": workers, "warnings": list(messages)}

    found = {}
    for method in START_METHODS:
        multiprocessing.set_start_method(method, force=True)
        with mounted("-t", "tmpfs", "-o", "size=128k", "none"):
            found[f"tiny, {method}"] = case(False, False)
            found[f"tiny, batches held, {method}"] = case(True, False)
            found[f"filled during a pass, {method}"] = case(True, True)
            fill()  # also what the semaphores of that pass had
            found[f"full, {method}"] = case(False, False)
        with mounted("-t", "proc", "none"):  # where files cannot be made
            found[f"missing, {method}"] = case(False, False)
    return found


@contextmanager
def mounted(*how: str) -> Iterator[None]:
    subprocess.run(["mount", *how, "/dev/shm"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", "/dev/shm"], check=True)


def fill() -> None:
    with suppress(OSError), open("/dev/shm/full", "ab", buffering=0) as file:
        while True:
            file.write(bytes(1024))


if __name__ == "__main__":
    print(json.dumps(all_cases(Path(sys.argv[1]), Path(sys.argv[2]))))
