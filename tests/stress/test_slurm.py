"""examples/slurm.sbatch with stand-ins for srun and scontrol: two nodes that are this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training import assert_same_weights

from fastaug.config import TrainConfig
from fastaug.runs.checkpoint import load_checkpoint

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/slurm.sbatch"
# As the real one: a task for each number, signals to the tasks' process groups; its own SIGTERM
# kills them ("forcing job termination").
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys

options = dict(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--ntasks"))
command = sys.argv[sys.argv.index("torchrun"):]
tasks = []
for number in range(int(options["ntasks"])):
    places = {{"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": 0}}
    environment = os.environ | {{name: str(value) for name, value in places.items()}}
    tasks.append(subprocess.Popen(command, env=environment, start_new_session=True))

def forward(signum, _frame):
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, signal.SIGKILL if signum == signal.SIGTERM else signum)

for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, forward)
print("stand-in srun: started", len(tasks), flush=True)
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$SCONTROL_LOG"
if [ "$1" = show ]; then printf 'localhost\\nlocalhost\\n'; fi
"""


class Cluster:
    """Starts the script as Slurm would."""

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        self.folder, self.calls = folder, folder / "scontrol.log"
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(text)
            program.chmod(0o755)
        names = ("data", "model", "size", "views", "batch_size", "epochs", "lr", "workers", "tta")
        settings = {name: config.get(name) for name in names}
        self.flags = [
            word
            for name, value in {**settings, "kernel": "reference", "checkpoint_every": 3}.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]

    def replace_torchrun(self, text: str) -> None:
        program = self.folder / "bin/torchrun"
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)

    def start(self, job: int, out: Path, **variables: str) -> subprocess.Popen:
        path = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SCONTROL_LOG": str(self.calls),
            "FASTAUG_OUT": str(out),
            "FASTAUG_RANKS_PER_TASK": "1",
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NAME": "fastaug",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_JOB_NODELIST": "node[0-1]",
            **variables,
        }
        return subprocess.Popen(
            ["bash", str(SCRIPT), *self.flags],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def requeued(self) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if line.startswith("requeue")]


@pytest.fixture
def cluster(tmp_path: Path, tiny: Callable[..., TrainConfig]) -> Cluster:
    return Cluster(tmp_path, tiny(epochs=12))


def test_a_requeued_job_ends_as_an_undisturbed_one(cluster: Cluster, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    undisturbed = cluster.start(4711, whole)
    said, _ = undisturbed.communicate(timeout=300)
    assert undisturbed.returncode == 0, said
    assert cluster.requeued() == []

    job = cluster.start(4712, out)
    for _ in range(4000):  # until the first checkpoint within an epoch
        if (out / "last.pt").exists():
            break
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGUSR1)  # to the shell only, as --signal=B:USR1 does
    said, _ = job.communicate(timeout=120)
    assert job.returncode != 0, said
    # Of the script and of the ranks. One that has already stopped with the other ignores it.
    assert said.count("SIGUSR1: ") in (2, 3), said
    assert "[rank" not in said, said  # how torch marks a rank's traceback
    assert cluster.requeued() == ["requeue 4712"], said
    stopped_at = load_checkpoint(out / "last.pt")["step"]
    assert 0 < stopped_at < load_checkpoint(whole / "last.pt")["step"]

    again = cluster.start(4712, out)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert f"resumed at step {stopped_at}" in said, said
    assert_same_weights(out, whole)
    assert len(cluster.requeued()) == 1


@pytest.mark.parametrize(
    ("variables", "tasks", "ranks"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 2, 8),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS_PER_NODE": "4"}, 8, 1),
        ({"SLURM_GPUS_PER_TASK": "a100:1", "SLURM_NTASKS_PER_NODE": "4"}, 8, 1),
        ({"FASTAUG_RANKS_PER_TASK": "3", "SLURM_GPUS_ON_NODE": "8"}, 2, 3),
    ],
    ids=["all-gpus-per-task", "shared-gpus", "one-gpu-per-task", "given"],
)
def test_tasks_and_ranks(
    cluster: Cluster, tmp_path: Path, variables: dict[str, str], tasks: int, ranks: int
) -> None:
    cluster.replace_torchrun('echo "$SLURM_PROCID:" "$@"')
    job = cluster.start(25, tmp_path / "run", **{"FASTAUG_RANKS_PER_TASK": "", **variables})
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    lines = [line.split() for line in said.splitlines() if line[0].isdigit()]
    assert sorted(line[0] for line in lines) == [f"{number}:" for number in range(tasks)]
    for line in lines:
        assert f"--nnodes={tasks}" in line
        assert f"--nproc-per-node={ranks}" in line
        assert "--rdzv-endpoint=localhost:20025" in line
        assert line[line.index("-m") + 1 :] == [
            *("fastaug.train", "--out", str(tmp_path / "run"), "--resume", "auto"),
            *cluster.flags,
        ]


@pytest.mark.parametrize(
    ("signum", "on_signal", "code", "requeued"),
    [
        (signal.SIGUSR1, "exit 1", 1, True),
        (signal.SIGTERM, "exit 1", 1, True),
        (signal.SIGUSR1, "exit 0", 0, False),  # it was about to end
        (None, "", 3, False),  # a failure
    ],
    ids=["usr1", "term", "finished", "failed"],
)
def test_what_is_queued_again(
    cluster: Cluster, tmp_path: Path, signum: int | None, on_signal: str, code: int, requeued: bool
) -> None:
    """A second signal is not passed on: the trap of the stand-in torchrun works once."""
    ready = f"touch {tmp_path}/ready-$SLURM_PROCID"
    waits = f"trap 'trap - USR1; sleep 1; {on_signal}' USR1; {ready}; sleep 60 & wait"
    cluster.replace_torchrun(waits if signum else f"exit {code}")
    job = cluster.start(26, tmp_path / "run")
    if signum:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(job.pid, signum)
        time.sleep(0.3)
        os.kill(job.pid, signum)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == code, said
    assert cluster.requeued() == (["requeue 26"] if requeued else [])
