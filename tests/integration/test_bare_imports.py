"""Imports and losses where only torch and numpy are installed, and where the system is Windows."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from bare_site import link_distributions

ROOT = Path(__file__).parents[2]


def run(script: str, path: list[Path], cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with these folders and the standard library, and without any other packages."""
    start = f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}\n"
    environment = {"PATH": os.environ["PATH"], "FASTAUG_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """fastaug, torch, numpy and their requirements: pip install --no-deps fastaug."""
    site = tmp_path_factory.mktemp("bare") / "site"
    return [ROOT, link_distributions(site, "torch", "numpy")]


class TestOnlyTorchAndNumpy:
    def test_the_site_is_bare(self, bare: list[Path], tmp_path: Path) -> None:
        for name in ("PIL", "timm", "torchvision", "tyro", "rich", "nvidia.dali", "pyarrow"):
            result = run(f"import {name}", bare, tmp_path)
            assert "ModuleNotFoundError" in result.stderr, name

    def test_losses(self, bare: list[Path], compiled_cache: Path) -> None:
        script = """
            import torch, fastaug
            logits = torch.zeros(2, 3, 4, requires_grad=True)
            fastaug.objective(logits, torch.tensor([1, 2])).loss.backward()
            for grad in logits.grad[:, 0].tolist():
                print([round(value * 24, 4) for value in grad])
            print(fastaug.pairwise_kl(torch.zeros(2, 3, 4)).tolist())
            loss = fastaug.MultiViewLoss(views=3)(torch.zeros(6, 4), torch.tensor([1, 2]))
            print(round(loss.exp().item(), 4))
        """
        result = run(script, bare, compiled_cache)
        assert result.returncode == 0, result.stderr
        # (p - y) / (images * views), p = 1/4
        expected = ["[1.0, -3.0, 1.0, 1.0]", "[1.0, 1.0, -3.0, 1.0]", "[0.0, 0.0]", "4.0"]
        assert result.stdout.splitlines() == expected

    @pytest.mark.parametrize("augment", ["crop-flip", "randaugment"])
    def test_views(self, bare: list[Path], compiled_cache: Path, augment: str) -> None:
        """The image has one color: crops are that color, and RandAugment only warns."""
        script = f"""
            import logging, torch, fastaug
            logging.basicConfig(level=logging.WARNING)
            images = [torch.full((40, 50, 3), 200, dtype=torch.uint8)]
            plan = fastaug.plan_views(images, views=3, size=24, augment={augment!r})
            views = fastaug.make_views(images, plan, normalize=None)
            print(list(views.shape), views.isfinite().all().item())
            print(views.round(decimals=3).unique().tolist() if {augment == "crop-flip"} else [])
        """
        result = run(script, bare, compiled_cache)
        assert result.returncode == 0, result.stderr
        values = "[200.0]" if augment == "crop-flip" else "[]"
        assert result.stdout.splitlines() == ["[1, 3, 3, 24, 24] True", values]
        assert "Pillow" in result.stderr  # the operations were not compared

    @pytest.mark.parametrize("module", ["fastaug.train", "fastaug"])
    def test_commands_name_the_missing_package(
        self, bare: list[Path], tmp_path: Path, module: str
    ) -> None:
        """python -m fastaug.train, which fails at its first import, and fastaug train."""
        script = f"""
            import runpy
            sys.argv = ["-m", "train"]  # as Python has them while it imports the package
            sys.orig_argv = [sys.executable, "-m", {module!r}, "train"]
            runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
        """
        result = run(script, bare, tmp_path)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1
        assert "pip install" in result.stderr


WINDOWS = """
    import mmap, os, signal
    import torch, numpy, subprocess, multiprocessing, tempfile, importlib.metadata
    for module in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog"):
        sys.modules[module] = None  # its import fails
    for owner, names in (
        (signal, "SIGKILL SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGQUIT SIGCHLD SIGPIPE alarm setitimer"),
        (os, "sched_getaffinity fork killpg getpgid setsid statvfs sysconf posix_fadvise pread "
             "getuid geteuid register_at_fork uname getloadavg nice O_DIRECTORY O_CLOEXEC"),
        (mmap, " ".join(n for n in vars(mmap) if n.startswith(("MAP_", "MADV_", "PROT_")))),
    ):
        for name in names.split():
            if hasattr(owner, name):
                delattr(owner, name)
    sys.platform = PLATFORM
    os.environ["PATH"] = ""  # no compiler
"""


@pytest.mark.parametrize("platform", ["win32", "darwin"])
class TestOtherSystems:
    """What Linux has and Windows has not is removed, after torch is imported."""

    def run(self, platform: str, script: str, cache: Path) -> subprocess.CompletedProcess[str]:
        here = [ROOT, *(Path(folder) for folder in sys.path if folder)]
        start = textwrap.dedent(WINDOWS).replace("PLATFORM", repr(platform))
        return run(start + textwrap.dedent(script), here, cache)

    def test_the_loss_and_the_reference_views(self, platform: str, tmp_path: Path) -> None:
        script = """
            import fastaug
            from fastaug.views.config import ViewConfig
            from fastaug.views.reference import reference_views
            print(fastaug.pairwise_kl(torch.zeros(2, 3, 4)).tolist())
            print(fastaug.available_kernels(torch.zeros(1, 2, 3))["native"])
            image = torch.full((40, 50, 3), 200, dtype=torch.uint8)
            plan = fastaug.plan_views([image], views=3, size=24)
            config = ViewConfig(size=24, views=3, normalize=(0.0, 1.0))
            views = reference_views(image.numpy(), plan.of_image(0), config)
            print(list(views.shape), (255 * views.unique()).round().unique().tolist())
            try:
                fastaug.make_views([image], plan)
            except fastaug.errors.KernelUnavailableError as error:
                print(error)
        """
        result = self.run(platform, script, tmp_path)
        assert result.returncode == 0, result.stderr
        kl, native, views, refused = result.stdout.splitlines()
        assert kl == "[0.0, 0.0]"
        assert "compiler" in native
        assert "compiler" in refused
        assert views == "[3, 24, 24, 3] [200.0]"

    def test_every_module_is_imported(self, platform: str, tmp_path: Path) -> None:
        script = """
            import importlib, pkgutil, fastaug
            for module in pkgutil.walk_packages(fastaug.__path__, "fastaug."):
                if module.name != "fastaug.kernels.triton_program":
                    importlib.import_module(module.name)
        """
        result = self.run(platform, script, tmp_path)
        assert result.returncode == 0, result.stderr
