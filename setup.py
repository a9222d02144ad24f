"""Packages are listed by hand, so that nothing is shipped by accident.

A wheel has prebuilt CPU kernels for the machine that FASTAUG_TARGET names: x86_64, aarch64 (needs a
cross compiler on other machines), or any (none). By default that is this machine; without a
compiler for it, the wheel has no kernels, and they are compiled on first use.
"""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "fastaug/__init__.py").read_text())[1]
# Not imported: fastaug needs torch, which a build has not installed.
PREBUILT = SimpleNamespace(**runpy.run_path(str(ROOT / "fastaug/toolchain/prebuilt.py")))
# fastaug.export --to onnx: torch's exporter needs the first two, the last one checks the file.
EXPORT = ["onnx", "onnxscript", "onnxruntime"]
# fastaug.sweep; fastaug.figures; fastaug.report. Before 4.9 Optuna names its retries differently.
PAPER = ["optuna>=4.9", "matplotlib", "jinja2"]
# --log wandb, --log mlflow. mlflow-skinny comes without what its local store needs. trackio is not
# here: it needs Pillow below 13.
LOGGERS = ["wandb>=0.31", "mlflow-skinny>=3", "sqlalchemy", "alembic"]
# examples/ of other people's training loops
INTEGRATIONS = ["accelerate", "lightning", "transformers>=5"]
# make docs
DOCS = ["mkdocs", "mkdocs-material"]


def long_description() -> str:
    """The README without the images and links that only the repository has."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    here = r"\((?!https?:)[^)\s]+\)"
    text = re.sub(rf"!\[[^\]]*\]{here}\n*", "", text)
    return re.sub(rf"\[([^\]]*)\]{here}", r"\1", text)


def compiler_for(machine: str) -> str | None:
    if machine != platform.machine():
        return shutil.which(f"{machine}-linux-gnu-g++")
    found = map(shutil.which, filter(None, (os.environ.get("CXX"), "g++")))
    return next(filter(None, found), None)


def build_kernels(folder: Path) -> str:
    """Compile the CPU kernels into a folder; returns the machine that they are for, or any."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier build, maybe for another machine
    asked = os.environ.get("FASTAUG_TARGET", "")
    if asked not in ("", "any", *PREBUILT.LEVELS):
        sys.exit(f"FASTAUG_TARGET={asked}: must be any, {' or '.join(PREBUILT.LEVELS)}")
    machine = asked or (platform.machine() if sys.platform == "linux" else "any")
    try:
        if machine in PREBUILT.LEVELS:
            compile_kernels(machine, folder)
            return machine
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"no prebuilt CPU kernels for {machine} ({error})"
        if asked:
            sys.exit(f"{reason}; install its compiler, or set FASTAUG_TARGET=any")
        print(f"{reason}: they will be compiled on first use", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
    return "any"


def compile_kernels(machine: str, folder: Path) -> None:
    if (compiler := compiler_for(machine)) is None:
        raise OSError("g++ was not found" if machine == platform.machine() else "no cross compiler")
    folder.mkdir(parents=True)
    commands = [
        PREBUILT.compile_command(compiler, ROOT / "cuda", source, level, folder)
        for source in PREBUILT.SOURCES
        for level in PREBUILT.LEVELS[machine]
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))


def needed_glibc(folder: Path) -> str:
    """The oldest glibc that has all symbols of the libraries, as in manylinux tags: 2_27."""
    libraries = sorted(folder.glob("*.so"))
    show = ["readelf", "--version-info", *libraries]
    text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    found = {tuple(map(int, version)) for version in re.findall(r"GLIBC_(\d+)\.(\d+)", text)}
    return "{}_{}".format(*max(found))


class BuildPackage(build_py):
    """Adds the prebuilt kernels, except to an editable installation."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.get_finalized_command("bdist_wheel").target = build_kernels(self.kernels)

    @property
    def kernels(self) -> Path:
        return Path(self.build_lib) / "fastaug" / PREBUILT.FOLDER.name


class Wheel(bdist_wheel):
    """One wheel for all Pythons: the kernels are loaded by ctypes."""

    target = "any"
    """The machine that the kernels are for; set by BuildPackage."""

    def run(self) -> None:
        self.run_command("build_py")
        self.root_is_pure = self.target == "any"
        self.distribution.has_ext_modules = lambda: not self.root_is_pure
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        if self.target == "any":
            return "py3", "none", "any"
        glibc = needed_glibc(self.get_finalized_command("build_py").kernels)
        return "py3", "none", f"manylinux_{glibc}_{self.target}"


setup(
    name="fastaug",
    version=VERSION,
    description="Image classifiers trained through K random views of every image at once",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=[
        *("fastaug", "fastaug.engine", "fastaug.runs", "fastaug.runs.loggers"),
        *("fastaug.runtime", "fastaug.data"),
        *("fastaug.data.packing", "fastaug.data.readers", "fastaug.data.remote"),
        *("fastaug.views", "fastaug.kernels", "fastaug.toolchain", "fastaug.models"),
        *("fastaug.exporters", "fastaug.experiments"),
        *("fastaug.diagnostics", "fastaug.diagnostics.gpu_report"),
        # Folders beside fastaug/ in the tree. cuda/ holds sources only, and no __init__.py: with
        # one it would hide NVIDIA's package of that name from whoever starts Python here.
        *("fastaug.pipelines", "fastaug.cuda"),
    ],
    package_dir={"fastaug.pipelines": "pipelines", "fastaug.cuda": "cuda"},
    package_data={
        "fastaug": ["py.typed"],
        "fastaug.cuda": ["*.h", "*.cpp", "*.cu"],
        "fastaug.experiments": ["templates/*"],
        "fastaug.diagnostics.gpu_report": ["templates/*"],
    },
    install_requires=[
        "google-crc32c",  # checksums of TFRecords
        "numpy>=2",
        # 2.4: earlier ones have no fn.filter and fn.equalize. NVIDIA builds it for Linux alone. Its
        # twin for CUDA 13, nvidia-dali-cuda130, takes the same folder: it replaces this one.
        "nvidia-dali-cuda120>=2.4; sys_platform == 'linux'",
        "obstore>=0.12",  # --data s3://, gs://, http(s)://
        "pillow",
        "pyyaml",  # --config; timm needs it, too
        "pyarrow",  # Hugging Face's Parquet and Arrow files
        "rich",
        "safetensors",
        "tensorboard",
        "timm>=1.0",
        "torch>=2.9",
        "torchvision",  # timm needs it
        "tyro>=0.9",
    ],
    extras_require={
        "export": EXPORT,
        "paper": PAPER,
        "docs": DOCS,
        "loggers": LOGGERS,
        "integrations": INTEGRATIONS,
        "dev": [
            *EXPORT,
            *INTEGRATIONS,
            *DOCS,
            *LOGGERS,
            *PAPER,  # matplotlib also draws the plots of benchmarks/
            # Coverage-guided fuzzing; has wheels for these only.
            "atheris; sys_platform == 'linux' and platform_machine == 'x86_64'",
            "build",
            "flask",  # with flask-cors and moto: an S3 server for tests
            "flask-cors",
            "hypothesis",
            "ipykernel",  # with nbclient: runs examples/quickstart.ipynb in a test
            "moto[s3]",
            "mypy",
            "nbclient",
            "nvidia-cuda-nvdisasm; sys_platform == 'linux'",  # tests of the GPU's machine code
            "pre-commit",
            "psutil",  # benchmarks/: CPU time, memory and descriptors
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "scipy",
            "setuptools",
            "twine",  # make dist
            "wheel",
        ],
    },
    cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel},
    entry_points={"console_scripts": ["fastaug=fastaug.__main__:script"]},
)
