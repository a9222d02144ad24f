"""Machines that are full: a real file system without room, and a process without memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOSS = """
import sys, torch, fastaug
from fastaug import cli
def main(_):
    logits = torch.randn(4, 3, 5, requires_grad=True)
    loss = fastaug.objective(logits, torch.tensor([0, 1, 2, 3]), kernel=sys.argv[1]).loss
    loss.backward()
    print(loss.item())
    return 0
sys.exit(cli.run(main, []))
"""


def can_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True).returncode == 0
    except OSError:
        return False


class TestFullDisk:
    """The cache, and then also the folder for temporary files, on a file system of 64 KB."""

    pytestmark = pytest.mark.skipif(not can_mount(), reason="file systems cannot be mounted here")

    @staticmethod
    def compute(folder: Path, kernel: str, temporary: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir()
        script = (
            'mount -t tmpfs -o size=64k none "$1" && mkdir "$1/cache" "$1/tmp" && export '
            f'FASTAUG_CACHE="$1/cache" TMPDIR="{temporary}" FASTAUG_NATIVE=1 && '
            '"$2" -c "$3" "$4" && ls -A "$1/cache/kernels"'
        )
        words = [str(folder), sys.executable, LOSS, kernel]
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", *words],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    def test_a_full_cache(self, tmp_path: Path) -> None:
        found = self.compute(tmp_path / "full", "native", str(tmp_path))
        assert found.returncode == 0, found.stderr
        warnings = [line for line in found.stderr.splitlines() if "No space left" in line]
        assert len(warnings) == 1
        assert str(tmp_path / "full/cache") in warnings[0]
        (_loss, *left) = found.stdout.splitlines()
        assert not any(name.startswith(".") for name in left)

    def test_a_full_temporary_folder_as_well(self, tmp_path: Path) -> None:
        full = tmp_path / "full"
        found = self.compute(full, "native", f"{full}/tmp")
        assert found.returncode == 2, found.stderr
        message = found.stderr.splitlines()[-1]
        assert message.startswith("error: ")
        assert "TMPDIR" in message
        assert "Traceback" not in found.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestNoMemory:
    """The limit of the address space is set to what the process has, and a bit more."""

    @staticmethod
    def limited(script: str, megabytes: float) -> subprocess.CompletedProcess[str]:
        limit = f"""
import os, re, resource, sys, torch, fastaug
from fastaug import cli
def limit():
    used = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1])
    resource.setrlimit(resource.RLIMIT_AS, (used + int({megabytes} * 1e6),) * 2)
"""
        return subprocess.run(
            [sys.executable, "-c", limit + script],
            env=os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"},
            capture_output=True,
            text=True,
        )

    def check(self, found: subprocess.CompletedProcess[str]) -> None:
        assert found.returncode == 1, found.stderr
        message = found.stderr.splitlines()[-1]
        assert message.startswith("error: out of memory")
        assert "--batch-size" in message
        assert "Traceback" not in found.stderr

    def test_in_the_view_kernel(self) -> None:
        """There is memory for the views, and none for what lies between two operations."""
        script = """
from fastaug.views import native
def main(_):
    images = [torch.zeros(64, 64, 3, dtype=torch.uint8)]
    options = dict(views=1, augment="randaugment", randaugment_layers=4)
    fastaug.make_views(images, fastaug.plan_views(images, size=32, **options))
    empty = native._empty
    native._empty = lambda *shape: (empty(*shape), limit())[0]
    fastaug.make_views(images, fastaug.plan_views(images, size=3000, **options))
sys.exit(cli.run(main, []))
"""
        self.check(self.limited(script, 5))

    @pytest.mark.parametrize("threads", [1, 2])
    def test_in_the_loss_kernel(self, threads: int) -> None:
        script = f"""
def main(_):
    torch.set_num_threads({threads})
    small, large = torch.randn(4, 2, 8), torch.randn(2, 8, 40000)
    fastaug.objective(small, torch.zeros(4, dtype=torch.long), kernel="native")
    targets = torch.zeros(2, dtype=torch.long)
    torch.ones(10**6) + 1  # starts the threads
    limit()
    fastaug.objective(large, targets, kernel="native")
sys.exit(cli.run(main, []))
"""
        self.check(self.limited(script, 0.5))

    def test_in_torch(self) -> None:
        script = """
def main(_):
    limit()
    torch.zeros(10**9)
sys.exit(cli.run(main, []))
"""
        self.check(self.limited(script, 30))

    def test_native_code_that_aborts_is_reported(self) -> None:
        found = self.limited("sys.exit(cli.run(lambda _: os.abort(), []))", 1000)
        assert found.returncode == -6
        assert "Aborted" in found.stderr
