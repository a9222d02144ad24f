"""torchrun over two hosts, which are network namespaces: the link drops, or a host is gone.

FASTAUG_LONG=1 adds the cases that take long.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hosts import Host, two_hosts, why_no_hosts
from ranks import run_ranks, train
from recorded import RECORDED, environment, flags, records, trained_on
from training import assert_same_weights, metrics, run, tiny_config, weights

from fastaug.config import TrainConfig
from fastaug.runs.checkpoint import load_checkpoint

if reason := why_no_hosts():
    pytest.skip(reason, allow_module_level=True)

long = pytest.mark.skipif("FASTAUG_LONG" not in os.environ, reason="takes long: FASTAUG_LONG=1")
STEPS = 24
STALL_SECONDS = 8
"""Without progress, a rank ends. Beside other work on two cores, a sound run was silent for 0.8."""
# Ranks write down their exit codes: torchrun does not report them while it waits for its store.
SCRIPT = f"""
import os

def record_exit(code, leave=os._exit):
    with open(os.environ["RECORD"] + ".ended", "a") as file:
        file.write(f"{{os.environ['RANK']}} {{code}}\\n")
    leave(code)

os._exit = record_exit
from fastaug.runtime import watchdog
watchdog._SIGNAL_SECONDS = 2.0
{RECORDED}"""


class Job:
    """One torchrun on each of two hosts."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path, config: TrainConfig) -> None:
        self.hosts, self.link, self.config = hosts, hosts[0].link, config
        self.out, self.record = Path(config.run.out), folder / "record.jsonl"
        self._folder, self._script = folder, folder / "recorded.py"
        self._script.write_text(SCRIPT)
        self.variables: dict[str, str] = {}
        """Environment variables of torchrun and its ranks."""
        self._processes: list[subprocess.Popen] = []

    def start(self, options: list[str], only: int | None = None) -> None:
        """Start torchrun with these options, on both hosts or on one."""
        for number, host in enumerate(self.hosts):
            if only not in (None, number):
                continue
            torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
            torchrun += ["--node-rank", str(number)] if "--master-addr" in options else []
            words = flags(self.config, checkpoint_every=2, stall_timeout=STALL_SECONDS)
            with open(self._folder / f"{host.name}.log", "ab") as log:
                process = host.start(
                    [*torchrun, str(self._script), *words],
                    env=environment(self.record) | self.variables,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self._processes.append(process)

    def rank(self, rank: int) -> int:
        """The process id of a rank."""
        return [pid for pid, found, *_ in records(self.record) if found == rank][-1]

    def exit_codes(self) -> dict[int, int]:
        """rank -> exit code, of those that have ended."""
        file = Path(f"{self.record}.ended")
        lines = file.read_text().splitlines() if file.exists() else []
        return dict(tuple(map(int, line.split())) for line in lines)

    def said(self, number: int) -> str:
        return (self._folder / f"{self.hosts[number].name}.log").read_text()

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + 240
        while not what():
            assert time.monotonic() < deadline, f"{self.said(0)}\n{self.said(1)}"
            time.sleep(0.05)

    def reach(self, step: int, ranks: int = 2) -> None:
        """Wait until all of so many ranks are in this step or a later one."""

        def arrived() -> bool:
            found = {r for _, r, of, at, _ in records(self.record) if of == ranks and at >= step}
            return len(found) == ranks

        self.wait_for(arrived)

    def finish(self) -> list[int]:
        """The exit codes of all torchruns."""
        self.wait_for(lambda: all(process.poll() is not None for process in self._processes))
        return [process.returncode for process in self._processes]

    def end(self) -> None:
        for host in self.hosts:
            host.kill_processes()
        for process in self._processes:
            process.wait()


@pytest.fixture
def job(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Two hosts; the first one's name is host-a."""
    with two_hosts(own_name_is_loopback=getattr(request, "param", False)) as hosts:
        found = Job(hosts, tmp_path, whole_config(folder, tmp_path / "run"))
        try:
            yield found
        finally:
            found.end()


def whole_config(data: Path, out: Path) -> TrainConfig:
    return tiny_config(data, out, epochs=STEPS // 4, kernel="reference")


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an undisturbed run on one host, with two ranks."""
    config = whole_config(folder, tmp_path_factory.mktemp("whole") / "run")
    assert run_ranks(2, train, config) == [0, 0]
    return Path(config.run.out)


def c10d(nodes: str = "2", *more: str) -> list[str]:
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host-a:29500", "--rdzv-id", "job"]
    return ["--nnodes", nodes, "--nproc-per-node", "1", *endpoint, *more]


# Without it, a new torchrun waits in vain for the address of rank 0's store, which torchrun (2.14)
# publishes only once.
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
STATIC = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "10.213.0.1"]


def assert_close_weights(ours: Path, theirs: Path) -> None:
    """Up to rounding: another number of ranks adds gradients in another order."""
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=2e-5)


# Debian's /etc/hosts: gloo would listen at 127.0.1.1, where the other host does not find it.
@pytest.mark.parametrize("job", [True], ids=["own-name-is-loopback"], indirect=True)
def test_a_link_that_drops_for_seconds(job: Job, whole: Path) -> None:
    job.start(c10d())
    job.reach(5)
    with job.link.cut():
        time.sleep(1)
        before = len(records(job.record))
        time.sleep(2)  # without the cut, it would be at the last step
        assert len(records(job.record)) == before < 2 * STEPS
    assert job.finish() == [0, 0], job.said(0)
    assert_same_weights(job.out, whole)
    assert metrics(job.out) == metrics(whole)


@long
def test_packets_that_are_lost(job: Job, whole: Path) -> None:
    job.start(c10d())
    job.reach(3)
    job.link.drop(0.2)
    assert job.finish() == [0, 0], job.said(0)
    assert_same_weights(job.out, whole)
    assert metrics(job.out) == metrics(whole)


@pytest.mark.parametrize("signaled", [0, pytest.param(1, marks=long)])
@pytest.mark.parametrize("how", ["down", pytest.param("silent", marks=long)])
def test_a_link_that_drops_for_good(job: Job, whole: Path, signaled: int, how: str) -> None:
    """One rank gets a signal, which it answers; the other one ends after the stall timeout."""
    job.start(STATIC)
    job.reach(5)
    job.link.down() if how == "down" else job.link.drop(1)
    cut_at = time.monotonic()
    os.kill(job.rank(signaled), signal.SIGTERM)
    job.wait_for(lambda: signaled in job.exit_codes())
    assert time.monotonic() - cut_at < STALL_SECONDS
    job.wait_for(lambda: len(job.exit_codes()) == 2)
    assert job.exit_codes() == {signaled: 128 + signal.SIGTERM, 1 - signaled: 75}
    for number in range(2):
        errors = [line for line in job.said(number).splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, errors
        assert ("SIGTERM" if number == signaled else "--stall-timeout") in errors[0]
    # The first host has saved all complete steps; one host with one rank continues.
    begun = max(step for _, _, _, step, _ in records(job.record))
    last = job.out / "last.pt"
    assert begun - 1 <= load_checkpoint(last)["step"] <= begun
    run(job.config, checkpoint=last)
    assert_close_weights(job.out, whole)


@pytest.mark.parametrize("returns", [False, pytest.param(True, marks=long)])
def test_a_host_that_is_gone(job: Job, whole: Path, returns: bool) -> None:
    """--nnodes 1:2: the other one continues without it, and with it when it is back."""
    job.variables = REJOIN | {"ONE_RANK_SECONDS": "3" if returns else "0.1"}
    start = c10d("1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=1")
    job.start(start)
    job.reach(5)
    job.hosts[1].kill()
    job.reach(7, ranks=1)
    assert 0 < min(step for _, _, ranks, step, _ in records(job.record) if ranks == 1) <= 7
    if returns:
        job.link.up()
        job.start(start, only=1)
        job.reach(8)
    assert job.finish() == [0, -signal.SIGKILL] + [0] * returns, job.said(0)
    assert_close_weights(job.out, whole)
    steps = trained_on(job.record, STEPS)
    for first in range(0, STEPS, 4):  # an epoch has each image once
        assert len({image for step in range(first, first + 4) for image in steps[step]}) == 32


@long
def test_a_host_that_is_gone_and_comes_back(job: Job, whole: Path) -> None:
    """--nnodes 2: the other one waits for it."""
    job.variables = REJOIN
    start = c10d("2", "--max-restarts", "3")
    job.start(start)
    job.reach(5)
    job.hosts[1].kill()
    job.wait_for(lambda: 0 in job.exit_codes())
    job.link.up()
    job.start(start, only=1)
    assert job.finish() == [0, -signal.SIGKILL, 0], job.said(0)
    assert_same_weights(job.out, whole)
    assert metrics(job.out) == metrics(whole)
