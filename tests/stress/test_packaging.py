"""What the wheel and the sdist hold, and that they work without the tree and without a compiler."""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import torch

from fastaug.__main__ import COMMANDS
from fastaug.kernels import admission as loss_admission
from fastaug.kernels import native as native_kernel
from fastaug.runtime.device import cpp_compiler
from fastaug.runtime.file_lock import wait_for_lock
from fastaug.toolchain import prebuilt
from fastaug.views import admission as view_admission
from fastaug.views import native as native_views

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Without what an editable install adds to Python's ways of finding modules.
NO_EDITABLE = "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in repr(f)]\n"
HAS_KERNELS = cpp_compiler() is not None and platform.machine() in prebuilt.LEVELS


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist and the wheel, built once for all workers of pytest: a minute of compiling."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "dist.lock").open("w") as lock:
        wait_for_lock(lock.fileno())
        if not (shared / "dist").is_dir():
            build_dist(tmp_path_factory.mktemp("source"), shared / "unfinished")
            (shared / "unfinished").rename(shared / "dist")
    return shared / "dist"


def build_dist(source: Path, out: Path) -> None:
    """The sdist, built from a copy of what git would have, and the wheel, built from the sdist."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    environment = {**os.environ, "FASTAUG_TARGET": ""}
    subprocess.run(build, check=True, capture_output=True, env=environment)


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def metadata_of(unpacked: Path) -> Message:
    (file,) = unpacked.glob("*.dist-info/METADATA")
    return email.message_from_bytes(file.read_bytes())


class TestContents:
    def test_every_module_and_nothing_else(self, unpacked: Path) -> None:
        files = {p.relative_to(unpacked).as_posix() for p in unpacked.rglob("*") if p.is_file()}
        names = {name for name in files if ".dist-info/" not in name}
        modules = {str(p.relative_to(ROOT)) for p in (ROOT / "fastaug").rglob("*.py")}
        modules |= {f"fastaug/{p.relative_to(ROOT)}" for p in (ROOT / "pipelines").rglob("*.py")}
        sources = {f"fastaug/cuda/{p.name}" for p in (ROOT / "cuda").iterdir()}
        assert "fastaug/cuda/objective.cpp" in sources
        folder = "fastaug/experiments/templates"
        parts = ("report.html.j2", "paper.html.j2", "macros.html.j2", "report.css", "report.js")
        templates = {f"{folder}/{name}" for name in parts}
        folder = "fastaug/diagnostics/gpu_report/templates"
        templates |= {f"{folder}/gpu_report.{suffix}" for suffix in ("html.j2", "css")}
        levels = ("v2", "v3", "v4", "v4-vbmi") if platform.machine() == "x86_64" else ()
        names_of_levels = [f"x86-64-{level}" for level in levels] or ["armv8-a"]
        kernels = {
            f"fastaug/prebuilt/{source}-{level}.so"
            for source in ("objective", "views")
            for level in names_of_levels
            if HAS_KERNELS
        }
        assert names == modules | sources | templates | kernels | {"fastaug/py.typed"}

    def test_script_requirements_and_python(self, unpacked: Path) -> None:
        (points,) = unpacked.glob("*.dist-info/entry_points.txt")
        assert "fastaug = fastaug.__main__:script" in points.read_text()
        metadata = metadata_of(unpacked)
        required = metadata.get_all("Requires-Dist", [])
        needed = ("torch", "timm", "numpy", "tensorboard", "tyro", "rich", "pillow")
        for name in (*needed, "nvidia-dali-cuda120"):
            assert any(re.match(rf"{name}\b", line) for line in required), name
        assert metadata["License"] == "Apache-2.0"
        assert metadata["Requires-Python"] == ">=3.11"
        classifiers = metadata.get_all("Classifier", [])
        assert "Programming Language :: Python :: 3.11" in classifiers
        assert "Programming Language :: Python :: 3.10" not in classifiers
        assert metadata["Version"] == "0.2.0"

    def test_the_description_has_no_links_into_the_repository(self, unpacked: Path) -> None:
        text = str(metadata_of(unpacked).get_payload())
        targets = re.findall(r"\]\(([^)]+)\)", text)
        assert targets
        assert [target for target in targets if not target.startswith("https://")] == []
        assert "## Install and try" in text
        assert "make_views makes the views" in " ".join(text.split())  # the text of a link stays

    def test_twine_finds_nothing(self, dist: Path) -> None:
        check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("PASSED") == 2


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_every_module_is_valid_in_each_python(unpacked: Path, version: str) -> None:
    """Which of them are installed here depends on the machine."""
    places = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")
    python = next(map(str, places), None) or shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"no Python {version} here")
    script = "import pathlib, sys\nfor file in pathlib.Path(sys.argv[1]).rglob('*.py'):\n"
    script += "    compile(file.read_text(encoding='utf-8'), str(file), 'exec')"
    command = [python, "-W", "error", "-c", script, str(unpacked)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not HAS_KERNELS, reason="no compiler for prebuilt kernels here")
class TestKernels:
    def test_the_tag_is_the_glibc_that_they_need(self, wheel: Path, unpacked: Path) -> None:
        """The symbols as objdump lists them, and nothing of the system but glibc."""
        versions, libraries = set(), set()
        for file in (unpacked / "fastaug/prebuilt").iterdir():
            show = ["objdump", "-T", "-p", str(file)]
            text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
            versions |= {tuple(map(int, v)) for v in re.findall(r"GLIBC_(\d+)\.(\d+)", text)}
            libraries |= set(re.findall(r"NEEDED +(\S+)", text))
        major, minor = max(versions)
        assert (major, minor) <= (2, 28)  # torch's wheels need 2.28
        tag = f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"
        assert wheel.stem.endswith(tag)
        parts = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}
        assert libraries <= parts | {"ld-linux-aarch64.so.1"}

    @pytest.mark.parametrize(
        "level", prebuilt.LEVELS.get(platform.machine(), ()), ids=lambda v: v[0]
    )
    def test_each_level_passes_the_admission_checks(
        self, unpacked: Path, monkeypatch: pytest.MonkeyPatch, level: prebuilt.Level
    ) -> None:
        if not level.features <= set(prebuilt.cpu_features().split()):
            pytest.skip(f"this CPU does not run {level.name}")
        folder = unpacked / "fastaug/prebuilt"
        function = native_kernel._open(folder / f"objective-{level.name}.so")
        monkeypatch.setattr(native_kernel, "_library", lambda: (function, native_kernel._openmp()))
        library = native_views._open(folder / f"views-{level.name}.so")
        monkeypatch.setattr(native_views, "_library", lambda: library)
        for soft in (False, True):
            report = loss_admission.compare(native_kernel.NativeKernel(), CPU, soft=soft)
            assert report.admitted, report
        report = view_admission.compare(native_views.NativeViews(), CPU)
        assert report.admitted, report


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which has the other packages from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*pip, "--quiet", "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = folder.glob("lib/*/site-packages")
    # Only adds the folder: .pth files in it, as of an editable fastaug, are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return python


class TestInstalled:
    def test_training_without_a_compiler_uses_the_fused_kernels(
        self, python: Path, tmp_path: Path
    ) -> None:
        environment = {
            "PATH": str(python.parent),
            "FASTAUG_CACHE": str(tmp_path / "cache"),
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        }
        flags = ("--dali", "--device", "cpu", "--max-steps", "2", "--workers", "1", "--tta", "0")
        command = [str(python.parent / "fastaug"), "train", *flags, "--eval-views", "0"]
        command += ["--out", str(tmp_path / "run")]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run(command, **options)
        assert done.returncode == 0, done.stderr
        assert "compiling" not in done.stderr
        assert (tmp_path / "run" / "best.safetensors").is_file()
        chosen = ("native", "fused (native)") if HAS_KERNELS else ("reference", "dali")
        assert f"loss kernel: {chosen[0]}" in done.stderr
        assert f"views engine: {chosen[1]}" in done.stderr
        assert not list((tmp_path / "cache/kernels").glob("*.so"))

    def test_every_command_outside_the_tree(self, python: Path, tmp_path: Path) -> None:
        script = (
            "import fastaug, sys, torch\n"
            "assert fastaug.__file__.startswith(sys.prefix), fastaug.__file__\n"
            "assert not {'timm', 'PIL', 'nvidia.dali'} & set(sys.modules)\n"
            "from fastaug.toolchain.build import source_folder\n"
            "assert str(source_folder()).startswith(sys.prefix)\n"
            "print(fastaug.pairwise_kl(torch.zeros(2, 3, 4)).tolist())\n"
            "fastaug.build_model('wrn-10-1', 3), fastaug.build_loader\n"
            "import fastaug.pipelines.loader\n"
        )
        environment = {"PATH": "/usr/bin:/bin", "FASTAUG_CACHE": str(tmp_path / "cache")}
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        result = subprocess.run([str(python), "-c", script], **options)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == "[0.0, 0.0]"
        for module in COMMANDS:
            command = [str(python), "-m", f"fastaug.{module}", "--help"]
            subprocess.run(command, check=True, **options)

    def test_a_source_tree_takes_its_own_modules(self) -> None:
        """Started in a source tree, Python takes the tree's fastaug, whatever is installed."""
        script = NO_EDITABLE + "import fastaug.pipelines.loader as l; print(l.__file__)"
        command = [sys.executable, "-c", script]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert Path(found.stdout.strip()).resolve() == ROOT / "pipelines/loader.py"


class TestBuild:
    def build(
        self, dist: Path, out: Path, **variables: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """The sdist, built into a wheel by pip with other environment variables."""
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-v"]
        sdist = next(dist.glob("*.tar.gz"))
        environment = {k: v for k, v in os.environ.items() if k != "CXX"} | variables
        command = [*pip, "--wheel-dir", str(out), str(sdist)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done, [file.name for file in out.glob("*.whl")]

    def test_without_a_compiler_there_are_no_kernels(self, dist: Path, tmp_path: Path) -> None:
        done, names = self.build(dist, tmp_path / "out", PATH=str(tmp_path), FASTAUG_TARGET="")
        assert names == ["fastaug-0.2.0-py3-none-any.whl"], done.stdout + done.stderr
        assert "compiled on first use" in done.stdout + done.stderr
        with zipfile.ZipFile(tmp_path / "out" / names[0]) as archive:
            assert not [name for name in archive.namelist() if name.endswith(".so")]

    @pytest.mark.parametrize("target", ["sparc", "aarch64"])
    def test_a_target_that_cannot_be_built(self, dist: Path, tmp_path: Path, target: str) -> None:
        """Asked for by name, it is an error."""
        path = str(tmp_path)
        done, names = self.build(dist, tmp_path / "out", PATH=path, FASTAUG_TARGET=target)
        assert (done.returncode != 0, names) == (True, [])
        assert target in done.stdout + done.stderr

    @pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no cross compiler")
    def test_the_wheel_for_aarch64(self, dist: Path, tmp_path: Path) -> None:
        done, (name,) = self.build(dist, tmp_path / "out", FASTAUG_TARGET="aarch64")
        assert done.returncode == 0
        assert re.fullmatch(r"fastaug-0\.2\.0-py3-none-manylinux_2_\d\d_aarch64\.whl", name)
        with zipfile.ZipFile(tmp_path / "out" / name) as archive:
            libraries = [file for file in archive.namelist() if file.endswith(".so")]
            assert len(libraries) == 2
            for file in libraries:
                assert archive.read(file)[18:20] == (183).to_bytes(2, "little")  # EM_AARCH64
