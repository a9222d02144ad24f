"""Memory that batches reuse: no two tensors share it, and none is kept longer than it should be."""

from __future__ import annotations

import gc
import multiprocessing
import random
import resource
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fastaug.views.buffer_pool import BufferPool, SharedBuffers

SHAPES = [(4, 3, 5), (2, 3, 5), (7, 3, 5)]
PARTS = [
    lambda tensor: tensor,
    lambda tensor: tensor[1:],
    lambda tensor: tensor.permute(2, 0, 1)[::2],
    lambda tensor: tensor.flatten()[-3:],
    lambda tensor: tensor.detach().view(-1),
]


def use_in_any_order(pool: BufferPool, seed: int, steps: int = 400) -> None:
    """Take tensors, keep parts of them, drop them in any order; each part keeps its values."""
    draw = random.Random(seed)
    held: dict[int, Tensor] = {}
    for number in range(steps):
        tensor = pool.empty(draw.choice(SHAPES), draw.choice([torch.float32, torch.bfloat16]))
        tensor.fill_(number % 251)
        held[number] = draw.choice(PARTS)(tensor)
        del tensor
        while len(held) > draw.randrange(1, 9):
            dropped = draw.choice(list(held))
            assert (held.pop(dropped) == dropped % 251).all(), dropped
    for number, tensor in held.items():
        assert (tensor == number % 251).all(), number


def test_tensors_and_their_parts_keep_their_values() -> None:
    use_in_any_order(BufferPool(keep=3), seed=0)


def test_with_several_threads() -> None:
    pool, failed = BufferPool(keep=3), []

    def work(seed: int) -> None:
        try:
            use_in_any_order(pool, seed)
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("part", PARTS)
def test_memory_is_used_again_after_the_last_part_of_a_tensor(part) -> None:  # type: ignore[no-untyped-def]
    pool = BufferPool(keep=1)
    tensor = pool.empty((4, 3, 5), torch.float32)
    address = tensor.data_ptr()
    kept = part(tensor)
    del tensor
    assert pool.empty((4, 3, 5), torch.float32).data_ptr() != address
    del kept
    again = [pool.empty((4, 3, 5), torch.float32) for _ in range(2)]
    assert address in {tensor.data_ptr() for tensor in again}


def test_a_numpy_array_of_a_tensor_keeps_its_memory() -> None:
    pool = BufferPool(keep=1)
    array = pool.empty((100,), torch.float32).fill_(3).numpy()
    pool.empty((100,), torch.float32).fill_(5)
    assert (array == 3).all()


def test_vectors_can_be_stored_at_once() -> None:
    pool = BufferPool(keep=4)
    tensors = [pool.empty((1 + 17 * n,), torch.uint8) for n in range(8)]
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_surplus_memory_is_released_and_the_rest_with_the_pool() -> None:
    size = 2**25
    pool = BufferPool(keep=2)
    gc.collect()
    before = resident()
    tensors = [pool.empty((size,), torch.uint8).fill_(1) for _ in range(6)]
    assert resident() - before > 5.5 * size
    tensors.clear()
    assert 1.5 * size < resident() - before < 2.5 * size
    last = pool.empty((size,), torch.uint8)
    reference = weakref.ref(pool)
    del pool
    assert reference() is None
    assert resident() - before < 1.5 * size
    del last
    assert resident() - before < 0.5 * size


def test_memory_that_is_used_again_costs_no_page_faults() -> None:
    pool = BufferPool(keep=2)
    pages = 2**24 // resource.getpagesize()

    def faults_of(make) -> int:  # type: ignore[no-untyped-def]
        make().fill_(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            make().fill_(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert faults_of(partial(pool.empty, (2**24,), torch.uint8)) < pages / 10


class TestShared:
    def test_a_forked_process_fills_a_buffer(self) -> None:
        buffers = SharedBuffers(2, 4 * 60)
        number = buffers.take()
        assert number is not None

        def fill() -> None:
            buffers.to_fill(number, (5, 12), torch.float32).copy_(torch.arange(60.0).view(5, 12))

        worker = multiprocessing.get_context("fork").Process(target=fill)
        worker.start()
        worker.join()
        filled = buffers.filled(number, (5, 12), torch.float32)
        assert filled.tolist() == np.arange(60).reshape(5, 12).tolist()

    def test_a_buffer_is_unused_after_the_last_tensor_on_it(self) -> None:
        buffers = SharedBuffers(2, 40)
        assert {buffers.take(), buffers.take()} == {0, 1}
        assert buffers.take() is None
        part = buffers.filled(1, (10,), torch.float32)[3:]
        assert buffers.take() is None
        del part
        assert buffers.take() == 1

    def test_a_process_that_still_writes_to_a_replaced_one(self) -> None:
        buffers = SharedBuffers(1, 8)
        buffers.take()
        late = buffers.to_fill(0, (8,), torch.uint8)
        buffers.replace(0)
        assert buffers.take() == 0
        filled = buffers.filled(0, (8,), torch.uint8)
        late.fill_(9)
        assert filled.tolist() == [0] * 8
