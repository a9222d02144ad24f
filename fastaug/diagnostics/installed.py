"""What is installed, as facts: versions, and whether what is there works.

Packages are imported in the probes alone, so that a broken one is a line, too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

import fastaug
from fastaug.config import TrainConfig
from fastaug.diagnostics.machine import Fact, Probe, one_line
from fastaug.errors import KernelUnavailableError

# Distribution -> the module that shows whether it works, and what needs it.
_REQUIRED = {
    "torchvision": ("torchvision", "timm needs it"),
    "timm": ("timm", "--model nf_resnet50, nfnet_f0 and timm/NAME need it"),
    "numpy": ("numpy", "the loaders need it"),
    "pillow": ("PIL.Image", "the loaders need it"),
    "tensorboard": ("torch.utils.tensorboard", "training needs it"),
    "tyro": ("tyro", "the command line needs it"),
}
_OPTIONAL = ("matplotlib", "optuna")


def versions(devices: Sequence[torch.device]) -> dict[str, Probe]:
    """Name -> probe, for what is installed; DALI is tried on these devices."""
    return {
        "Python": _python,
        "fastaug": lambda: iter([Fact("fastaug", fastaug.__version__)]),
        "torch": _torch,
        **{name: partial(_package, name, *about) for name, about in _REQUIRED.items()},
        "DALI": partial(_dali, devices),
        "triton": _triton,
        "cuda-bindings": _cuda_bindings,
        "apex": _apex,
        **{name: partial(_package, name, name) for name in _OPTIONAL if _version(name)},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Iterator[Fact]:
    yield Fact("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def _torch() -> Iterator[Fact]:
    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built for the CPU alone"
    yield Fact("torch", f"{torch.__version__}, {build}")


def _package(name: str, module: str, needed: str = "", extra: str = "") -> Iterator[Fact]:
    """One that is needed is missed where it is not there, and any is where it is broken."""
    version = _version(name)
    if version is None:
        yield Fact(name, "not installed", f"pip install {name}: {needed}" if needed else "")
        return
    try:
        importlib.import_module(module)
        yield Fact(name, version + extra)
    except Exception as error:  # a package may raise anything when it is imported
        todo = f"{name} is installed and broken: pip install --force-reinstall {name}"
        yield Fact(name, f"{version}, cannot be imported: {one_line(error)}", todo, failed=True)


def _triton() -> Iterator[Fact]:
    needed = "the triton kernel needs it" if torch.cuda.is_available() else ""
    yield from _package("triton", "triton", needed)


def _cuda_bindings() -> Iterator[Fact]:
    from fastaug.toolchain.nvrtc import nvrtc_version

    needed = "the cuda kernel needs it" if torch.cuda.is_available() else ""
    try:
        extra = f", NVRTC {nvrtc_version()}"
    except KernelUnavailableError as error:
        extra = f"; {error}"
    yield from _package("cuda-bindings", "cuda.bindings", needed, extra)


def _apex() -> Iterator[Fact]:
    """NVIDIA's is not on PyPI, and the apex there is another package."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        yield Fact("apex", "not installed; --optimizer sgd does without")
    elif not any((Path(f) / "optimizers").is_dir() for f in spec.submodule_search_locations or ()):
        todo = "pip uninstall apex: it is another package of that name, not NVIDIA's"
        yield Fact("apex", "the unrelated package of PyPI", todo)
    elif importlib.util.find_spec("amp_C") is None:
        todo = "build apex (github.com/NVIDIA/apex) with its CUDA extensions, or remove it"
        yield Fact("apex", "NVIDIA's, without its CUDA extensions: no --optimizer apex", todo)
    else:
        yield from _package("apex", "apex.optimizers", extra=", NVIDIA's")


def _dali(devices: Sequence[torch.device]) -> Iterator[Fact]:
    """Whether its pipelines can make a batch on each of the devices."""
    found = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
        if (distribution.metadata["Name"] or "").startswith("nvidia-dali")
    }
    if not found:
        todo = "pip install nvidia-dali-cuda120: --dali needs it; --loader torch does without"
        if sys.platform != "linux":
            yield Fact("DALI", "not installed: it is for Linux; --loader torch does without")
        else:
            yield Fact("DALI", "not installed", todo)
        return
    value = ", ".join(f"{version} ({name})" for name, version in found.items())
    fails = {device: reason for device in devices if (reason := _why_no_batch(device))}
    if works := [str(device) for device in devices if device not in fails]:
        value += f", works on {', '.join(works)}"
    for device, reason in fails.items():
        value += f"; fails on {device}: {reason}"
    if fails:
        todo = f"DALI fails: pip install --force-reinstall {next(iter(found))}, or --loader torch"
        yield Fact("DALI", value, todo, failed=True)
    elif len(found) > 1:
        todo = f"pip uninstall all but one of {', '.join(found)}: they take the same folder"
        yield Fact("DALI", value, todo)
    else:
        yield Fact("DALI", value)


def _why_no_batch(device: torch.device) -> str:
    try:
        _make_batch(device)
    except Exception as error:  # of DALI, or of an installation that is broken
        return one_line(error)
    return ""


def _make_batch(device: torch.device) -> None:
    """Two views of a JPEG, read, decoded and augmented by the loader that a training would use."""
    import numpy as np
    from PIL import Image

    from fastaug.data.image_set import ImageSet, Manifest
    from fastaug.engine.loaders import build_loader

    config = TrainConfig.from_flat(
        loader="dali", device=str(device), views=2, batch_size=2, workers=1
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "image.jpg"
        Image.new("RGB", (48, 40), (200, 100, 50)).save(file)
        manifest = Manifest(np.array([[40, 48]], np.int32), np.array([True]))
        labels = np.zeros(1, np.int64)
        images = ImageSet("doctor", ("image",), labels, files=(file,), manifest=manifest)
        (batch,) = build_loader(config, images)
    if batch.views.device.type != device.type or not batch.views.isfinite().all():
        raise ValueError(f"its views are on {batch.views.device}, or not finite")
