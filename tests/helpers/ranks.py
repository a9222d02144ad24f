"""Some ranks of one run as processes: what torchrun does, without its start-up time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["fastaug.train", "fastaug.pipelines.loader"])


def start_ranks(count: int, work: Callable[..., Any], *args: Any) -> tuple[list, Any]:
    """The processes and the queue of (rank, result or traceback) of work(group, *args) on each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    results = SPAWN.Queue()
    processes = [
        SPAWN.Process(target=_rank, args=(rank, count, port, os.getcwd(), results, work, args))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    return processes, results


def run_ranks(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """work(group, *args) on so many ranks: their results, by rank."""
    processes, results = start_ranks(count, work, *args)
    found = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    for rank, result in found.items():
        if isinstance(result, str) and result.startswith("Traceback"):
            raise AssertionError(f"rank {rank}: {result}")
    return [found[rank] for rank in range(count)]


def _rank(
    rank: int, count: int, port: int, folder: str, results: Any, work: Callable, args: tuple
) -> None:
    import torch

    from fastaug.runtime.torchrun import join_process_group

    torch.set_num_threads(1)
    os.chdir(folder)
    places = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    try:
        with join_process_group() as group:
            results.put((rank, work(group, *args)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def train(group: Any, config: Any, checkpoint: Path | None = None) -> int:
    """A whole run on one of its ranks; returns its exit code."""
    from fastaug.engine.trainer import Trainer
    from fastaug.runtime.signals import TrainingInterruptedError

    try:
        Trainer(config, checkpoint, group).fit()
    except TrainingInterruptedError as interrupted:
        return interrupted.exit_code
    return 0


def train_until_signalled(group: Any, config: Any, signum: int) -> int:
    """A run whose second rank sends itself a signal in its third part of a step."""
    from fastaug.engine.learner import Learner

    if group.rank == 1:
        backward, calls = Learner.backward, []

        def signalling(*args: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signum)
            return backward(*args, **named)

        Learner.backward = signalling
    return train(group, config)
