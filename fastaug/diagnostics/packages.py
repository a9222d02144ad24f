"""Checks of the installed packages: versions, and whether they work.

Packages are imported inside their checks, so that a broken one is reported like any other fact.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import fastaug
from fastaug.config import TrainConfig
from fastaug.diagnostics.fact import Check, Fact
from fastaug.errors import KernelUnavailableError, describe_error

# Distribution -> a module whose import shows that it works, and what needs it.
_REQUIRED = {
    "torchvision": ("torchvision", "timm needs it"),
    "timm": ("timm", "--model nf_resnet50, nfnet_f0 and timm/NAME need it"),
    "numpy": ("numpy", "the loaders need it"),
    "pillow": ("PIL.Image", "the loaders need it"),
    "tensorboard": ("torch.utils.tensorboard", "training needs it"),
    "tyro": ("tyro", "the command line needs it"),
}
_OPTIONAL = ("matplotlib", "optuna")


def package_checks(devices: Sequence[torch.device]) -> dict[str, Check]:
    """Checks of what is installed, by name. DALI is tried on each of the devices."""
    system = f"{platform.system()} {platform.machine()}"
    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built for CPU only"
    return {
        "Python": lambda: Fact(f"{platform.python_version()}, {system}"),
        "fastaug": lambda: Fact(fastaug.__version__),
        "torch": lambda: Fact(f"{torch.__version__}, {build}"),
        **{name: partial(_package, name, *about) for name, about in _REQUIRED.items()},
        "DALI": partial(_dali, devices),
        "triton": partial(_package, "triton", "triton", _needed_on_gpu("triton")),
        "cuda-bindings": _cuda_bindings,
        "apex": _apex,
        **{name: partial(_package, name, name) for name in _OPTIONAL if _version(name)},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, module: str, needed: str = "", extra: str = "") -> Fact:
    """needed: advice if it is missing; extra: text after its version."""
    version = _version(name)
    if version is None:
        return Fact("not installed", f"pip install {name}: {needed}" if needed else "")
    try:
        importlib.import_module(module)
    except Exception as error:  # a package may raise anything when it is imported
        todo = f"{name} is installed but broken: pip install --force-reinstall {name}"
        return Fact(f"{version}, cannot be imported: {describe_error(error)}", todo, failed=True)
    return Fact(version + extra)


def _needed_on_gpu(kernel: str) -> str:
    return f"the {kernel} kernel needs it" if torch.cuda.is_available() else ""


def _cuda_bindings() -> Fact:
    from fastaug.toolchain.nvrtc import nvrtc_version

    try:
        extra = f", NVRTC {nvrtc_version()}"
    except KernelUnavailableError as error:
        extra = f"; {error}"
    return _package("cuda-bindings", "cuda.bindings", _needed_on_gpu("cuda"), extra)


def _apex() -> Fact:
    """NVIDIA's apex is not on PyPI, and the apex on PyPI is an unrelated package."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Fact("not installed; --optimizer sgd does not need it")
    if not any((Path(f) / "optimizers").is_dir() for f in spec.submodule_search_locations or ()):
        todo = "pip uninstall apex: it is another package of that name, not NVIDIA's"
        return Fact("the unrelated package from PyPI", todo)
    if importlib.util.find_spec("amp_C") is None:
        todo = "build apex (github.com/NVIDIA/apex) with its CUDA extensions, or remove it"
        return Fact("NVIDIA's, without its CUDA extensions: no --optimizer apex", todo)
    return _package("apex", "apex.optimizers", extra=", NVIDIA's")


def _dali(devices: Sequence[torch.device]) -> Fact:
    found = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
        if (distribution.metadata["Name"] or "").startswith("nvidia-dali")
    }
    if not found:
        if sys.platform != "linux":
            return Fact("not installed: DALI is for Linux; use --loader torch")
        todo = "pip install nvidia-dali-cuda120: --dali needs it, --loader torch does not"
        return Fact("not installed", todo)
    value = ", ".join(f"{version} ({name})" for name, version in found.items())
    errors = {str(device): _dali_error(device) for device in devices}
    if works := [device for device, error in errors.items() if not error]:
        value += f", works on {', '.join(works)}"
    fails = [f"; fails on {device}: {error}" for device, error in errors.items() if error]
    if fails:
        todo = f"DALI fails: pip install --force-reinstall {next(iter(found))}, or --loader torch"
        return Fact(value + "".join(fails), todo, failed=True)
    if len(found) > 1:
        todo = f"pip uninstall all but one of {', '.join(found)}: they use the same folder"
        return Fact(value, todo)
    return Fact(value)


def _dali_error(device: torch.device) -> str:
    try:
        _make_batch(device)
    except Exception as error:  # DALI or a broken installation may raise anything
        return describe_error(error)
    return ""


def _make_batch(device: torch.device) -> None:
    """Read, decode and augment two views of a JPEG with the loader that training would use."""
    import numpy as np
    from PIL import Image

    from fastaug.data.image_set import ImageSet, Manifest
    from fastaug.data.storage import Files
    from fastaug.engine.loaders import build_loader

    config = TrainConfig.from_flat(
        loader="dali", device=str(device), views=2, batch_size=2, workers=1
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "image.jpg"
        Image.new("RGB", (48, 40), (200, 100, 50)).save(file)
        manifest = Manifest(np.array([[40, 48]], np.int32), np.array([True]))
        labels = np.zeros(1, np.int64)
        images = ImageSet("doctor", ("image",), labels, storage=Files.of([file]), manifest=manifest)
        (batch,) = build_loader(config, images)
    if batch.views.device.type != device.type or not batch.views.isfinite().all():
        raise ValueError(f"its views are on {batch.views.device}, or not finite")
