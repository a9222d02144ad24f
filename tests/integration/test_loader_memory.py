"""Batches of a loader: independent of each other, in memory that is used again; epochs follow each
other without a stop."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from image_sets import open_data
from torch import Tensor
from training import tiny_config

import fastaug
from fastaug.config import TrainConfig
from fastaug.data.loader import ViewLoader
from fastaug.data.sampler import BatchKey
from fastaug.engine.loaders import build_evaluation_loader
from fastaug.views.batch import ViewBatch
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import draw_plans
from fastaug.views.reference import reference_views

Make = Callable[..., TrainConfig]

LOADERS: dict[str, dict] = {
    "torch": {"loader": "torch", "workers": 0},
    "torch workers": {"loader": "torch", "workers": 2},
    "fused": {"loader": "dali", "views_engine": "fused", "workers": 2},
    "dali operators": {"loader": "dali", "views_engine": "dali", "workers": 2},
}
BATCHES = 18
"""In an epoch of 36 images, two in a batch."""


@pytest.fixture(params=LOADERS)
def make(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Make:
    """The config of a loader of two images a batch."""
    shared = {"batch_size": 4, "prefetch": 1, "epochs": 3, **LOADERS[request.param]}
    return lambda **changes: tiny_config(folder, tmp_path / "run", **shared | changes)


@pytest.fixture
def large(tmp_path: Path) -> str:
    """Images in memory."""
    images = np.random.default_rng(0).integers(0, 256, (64, 64, 64, 3), np.uint8)
    labels = np.arange(64) % 4
    file = tmp_path / "large.npz"
    np.savez(file, images=images, labels=labels, test_images=images[:8], test_labels=labels[:8])
    return str(file)


def expected_views(config: TrainConfig, epoch: int, indices: Tensor) -> Tensor:
    """Made one by one by the reference, from images that Pillow decodes."""
    images = open_data(config.data.data, "train")
    view, numbers = config.resolved_view, indices.numpy()
    decoded = [images.image(int(index)) for index in numbers]
    sizes = np.array([image.shape[:2] for image in decoded])
    plans = draw_plans(view, config.run.seed, epoch, TRAIN_VIEWS, numbers, sizes)
    made = [reference_views(image, plans.of_image(i), view) for i, image in enumerate(decoded)]
    return torch.stack(made).permute(0, 1, 4, 2, 3)


def assert_expected(config: TrainConfig, epoch: int, indices: Tensor, views: Tensor) -> None:
    torch.testing.assert_close(views, expected_views(config, epoch, indices), rtol=0, atol=2e-3)


# --- memory ---


def test_all_batches_of_two_epochs_are_kept(make: Make) -> None:
    config = make()
    loader = fastaug.build_loader(config)
    epochs = [list(loader), list(loader)]
    for epoch, batches in enumerate(epochs):
        assert len(batches) == BATCHES
        for batch in batches:
            assert_expected(config, epoch, batch.indices, batch.views)


def test_parts_of_batches_outlive_them_in_any_order(make: Make) -> None:
    config, draw = make(), random.Random(0)
    loader = fastaug.build_loader(config)
    held: list[tuple[int, Tensor, Tensor]] = []

    def check(epoch: int, indices: Tensor, part: Tensor) -> None:
        assert_expected(config, epoch, indices, part)

    for epoch in range(3):
        for batch in loader:
            place = draw.randrange(2)
            held.append((epoch, batch.indices[place : place + 1], batch.views[place : place + 1]))
            while len(held) > draw.randrange(9):
                check(*held.pop(draw.randrange(len(held))))
    for kept in held:
        check(*kept)


def test_batches_end_in_other_threads(make: Make) -> None:
    config = make()
    waiting: list[tuple[int, ViewBatch]] = []
    wrong: list[object] = []
    done = threading.Event()

    def consume() -> None:
        while not (done.is_set() and not waiting):
            if not waiting:
                done.wait(0.001)
                continue
            epoch, batch = waiting.pop(0)
            try:
                assert_expected(config, epoch, batch.indices, batch.views)
            except AssertionError as error:
                wrong.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    loader = fastaug.build_loader(config)
    for epoch in range(3):
        for batch in loader:
            waiting.append((epoch, batch))
            del batch
    done.set()
    consumer.join()
    assert wrong == []


@pytest.mark.parametrize("kind", ["torch", "torch workers", "fused"])
def test_memory_is_used_again(folder: Path, tmp_path: Path, kind: str) -> None:
    """Also with RandAugment, with batches that are held for a while, after aborted passes."""
    settings = {"batch_size": 4, "epochs": 8, "augment": "randaugment", **LOADERS[kind]}
    loader = fastaug.build_loader(tiny_config(folder, tmp_path / "run", **settings))
    kept = [batch.views for batch in loader]
    del kept
    addresses = set()
    for _ in range(3):
        for batch in islice(loader, 7):
            addresses.add(batch.views.data_ptr())
        del batch  # the pass is aborted
    for _ in range(3):
        addresses.update(batch.views.data_ptr() for batch in loader)
    # 21 + 11 + 36 batches. A buffer is given up for each batch that an aborted pass has begun.
    assert len(addresses) <= (20 if kind == "torch workers" else 8)


def faults(processes: list[psutil.Process]) -> int:
    """Pages that the system has handed out to these processes: field 10 of their stat."""
    total = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[7])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["torch", "torch workers", "fused"])
def test_a_loop_of_the_user_s_own_costs_no_new_pages(large: str, tmp_path: Path, kind: str) -> None:
    """Batches of 25 MB, 6,144 pages each, without any setting of the process's malloc."""
    settings = {"views": 8, "batch_size": 128, "size": 128, "epochs": 60, **LOADERS[kind]}
    loader = fastaug.build_loader(tiny_config(Path(large), tmp_path / "run", **settings))
    counts = []
    for _ in range(30):
        for batch in loader:
            batch.views.sum()
        processes = [psutil.Process(), *map(psutil.Process, children())]
        counts.append(faults(processes))
    per_batch = (counts[-1] - counts[19]) / (10 * len(loader))
    assert per_batch < 6144 / 4, counts
    del batch


def children() -> list[int]:
    return sorted(child.pid for child in multiprocessing.active_children() if child.pid)


def test_memory_ends_with_the_loader(large: str, tmp_path: Path) -> None:
    """Resident memory, with the garbage collector off: a batch has 25 MB."""
    script = f"""
import gc, fastaug
from pathlib import Path
from training import tiny_config
gc.disable()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
def use(**settings):
    config = tiny_config(Path({large!r}), Path("unused"), views=8, batch_size=128,
                         size=128, epochs=9, **settings)
    loader = fastaug.build_loader(config)
    kept = list(loader) + list(loader) + list(loader)
    assert len(kept) == 12 and sum(batch.views.sum() for batch in kept)
    held = resident()
    kept.clear()
    batches = iter(loader)
    next(batches)
    return held, resident()
for settings in ({{"loader": "torch", "workers": 1}}, {{"loader": "dali"}}):
    use(**settings)  # threads, libraries
    before = resident()
    held, freed = use(**settings)
    print(held - before, freed - before, resident() - before)
"""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        held, freed, after = map(float, line.split())
        assert held > 11 * 25, line
        assert freed < 9 * 25, line  # those of the pool and of the prefetched batches
        assert after < 1.5 * 25, line


# --- the end of an epoch ---


@contextmanager
def requested(monkeypatch: pytest.MonkeyPatch, loader: ViewLoader) -> Iterator[list[BatchKey]]:
    """The keys of all batches that the loader has begun to make."""
    keys: list[BatchKey] = []
    batches = loader._sampler.batches

    def recorded(*arguments: object) -> Iterator[BatchKey]:
        for key in batches(*arguments):  # type: ignore[arg-type]
            keys.append(key)
            yield key

    with monkeypatch.context() as patch:
        patch.setattr(loader._sampler, "batches", recorded)
        yield keys


def test_the_next_epoch_begins_while_this_one_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = fastaug.build_loader(make(workers=1))
    with requested(monkeypatch, loader) as keys:
        assert sum(1 for _ in loader) == BATCHES
        ahead = [key.position for key in keys if key.epoch == 1]
        # With no workers, batches are made when they are asked for.
        assert ahead == list(range(len(ahead)))
        assert 0 < len(ahead) < BATCHES
        assert sum(1 for _ in loader) == BATCHES
        assert sum(1 for _ in loader) == BATCHES
        places = [(key.epoch, key.position) for key in keys]
    # Each batch once, and none beyond --epochs 3.
    assert places == [(epoch, place) for epoch in range(3) for place in range(BATCHES)]


def test_epochs_beyond_the_last_one_of_the_config(make: Make) -> None:
    config = make(epochs=1)
    loader = fastaug.build_loader(config)
    for epoch in range(3):
        for batch in loader:
            assert_expected(config, epoch, batch.indices, batch.views)
    assert (loader.epoch, loader.position) == (3, 0)


def test_an_evaluation_prefetches_nothing_beyond_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(workers=1)
    images = open_data(config.data.data, "test")
    loader = build_evaluation_loader(config, images, views=2, batch_size=4)
    with requested(monkeypatch, loader) as keys:
        for _ in range(2):
            loader.set_epoch(0)
            assert sum(1 for _ in loader) == 8
        assert [(key.epoch, key.position) for key in keys] == 2 * [(0, i) for i in range(8)]
    assert children() == []


MOVES: dict[str, Callable[[ViewLoader], object]] = {
    "stay": lambda loader: loader.set_epoch(1),
    "back": lambda loader: loader.set_epoch(0),
    "forward": lambda loader: loader.set_epoch(2),
    "state": lambda loader: loader.load_state_dict(
        loader.state_dict() | {"epoch": 1, "position": 5}
    ),
    "same state": lambda loader: loader.load_state_dict(loader.state_dict()),
    "views": lambda loader: loader.make_views(0, np.arange(5)),
    "begun": lambda loader: next(iter(loader)),
}


@pytest.mark.parametrize("move", MOVES)
def test_any_move_between_two_epochs(make: Make, move: str) -> None:
    """The batches that follow are those of a loader that has never been elsewhere."""
    config = make()
    moved = fastaug.build_loader(config)
    list(moved)
    assert (moved.epoch, moved.position) == (1, 0)
    MOVES[move](moved)
    fresh = fastaug.build_loader(config)
    fresh.load_state_dict(moved.state_dict())
    epoch = moved.epoch
    pairs = list(zip(moved, fresh, strict=True))
    assert len(pairs) == BATCHES - {"state": 5, "begun": 1}.get(move, 0)
    for ours, theirs in pairs:
        assert torch.equal(ours.indices, theirs.indices)
        assert torch.equal(ours.views, theirs.views)
        assert_expected(config, epoch, ours.indices, ours.views)


@pytest.mark.parametrize("stop", [BATCHES - 1, BATCHES, BATCHES + 1])
def test_a_state_at_the_end_of_an_epoch(make: Make, stop: int) -> None:
    """After the last batch but one, the last one, and the first of the next epoch."""
    config = make()
    whole = fastaug.build_loader(config)
    expected = [*whole, *whole]
    stopped = fastaug.build_loader(config)
    for _ in range(stop // BATCHES):
        list(stopped)
    for _ in zip(range(stop % BATCHES), stopped, strict=False):
        pass
    state = stopped.state_dict()
    assert (state["epoch"], state["position"]) == divmod(stop, BATCHES)
    resumed = fastaug.build_loader(config)
    resumed.load_state_dict(state)
    found = [batch for _ in range(2 - stop // BATCHES) for batch in resumed]
    for ours, theirs in zip(found, expected[stop:], strict=True):
        assert torch.equal(ours.views, theirs.views)


class TestWorkers:
    @pytest.fixture
    def config(self, folder: Path, tmp_path: Path) -> TrainConfig:
        settings = {"batch_size": 4, "epochs": 3, **LOADERS["torch workers"]}
        assert children() == []
        return tiny_config(folder, tmp_path / "run", **settings)

    def test_they_stay_from_epoch_to_epoch(self, config: TrainConfig) -> None:
        loader = fastaug.build_loader(config)
        seen = [children() for _ in range(3) for _ in loader]
        assert len(seen) == 3 * BATCHES
        assert [len(workers) for workers in seen] == [2] * len(seen)
        assert all(workers == seen[0] for workers in seen)
        assert children() == []

    def test_none_are_left_by_a_loader_that_is_gone(self, config: TrainConfig) -> None:
        loader = fastaug.build_loader(config)
        list(loader)
        assert len(children()) == 2
        gc.disable()
        try:
            del loader
            assert children() == []
        finally:
            gc.enable()

    @pytest.mark.parametrize("move", ["back", "forward", "state"])
    def test_none_are_left_after_a_move(self, config: TrainConfig, move: str) -> None:
        loader = fastaug.build_loader(config)
        list(loader)
        MOVES[move](loader)
        assert children() == []

    def test_they_are_replaced_if_they_die_between_two_epochs(self, config: TrainConfig) -> None:
        loader = fastaug.build_loader(config)
        list(loader)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        for batch in loader:
            assert_expected(config, 1, batch.indices, batch.views)
        assert (loader.epoch, loader.position) == (2, 0)


def test_a_process_ends_between_two_epochs(make: Make) -> None:
    script = (
        "import json, sys, types, fastaug\n"
        "config = fastaug.TrainConfig.from_saved(json.loads(sys.argv[1]))\n"
        "kept = types.SimpleNamespace(loader=fastaug.build_loader(config))\n"
        "kept.itself, kept.batches = kept, list(kept.loader)\n"
    )
    command = [sys.executable, "-c", script, json.dumps(make().to_flat())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
