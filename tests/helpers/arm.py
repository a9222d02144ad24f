"""The CPU kernels for aarch64, run under qemu-user: the loss kernel and the view engine."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastaug.kernels.contract import average_code
from fastaug.kernels.native import NativeKernel
from fastaug.toolchain import prebuilt
from fastaug.toolchain.build import DTYPES, source_folder
from fastaug.views.native import NativeViews
from fastaug.views.packed_plan import Pictures, encode_layers, encode_views, form_structure
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import RenderSpec

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_HELPERS = Path(__file__).parent


def why_not() -> str | None:
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Program:
    """A prebuilt library, and the driver of tests/helpers/ that calls it."""

    def __init__(self, source: str, folder: Path) -> None:
        (level,) = prebuilt.LEVELS["aarch64"]
        sources = source_folder()
        command = prebuilt.compile_command(COMPILER, sources, source, level, folder)
        subprocess.run(command, check=True)
        self.library = folder / prebuilt.library_name(source, level)
        self._driver, self._folder = folder / Path(source).stem, folder
        driver = _HELPERS / f"arm_{source}"
        flags = ("-O1", "-std=c++17", "-w", "-pthread", f"-I{sources}")
        compiler = [COMPILER, *flags, str(driver), "-ldl", "-o", str(self._driver)]
        subprocess.run(compiler, check=True)

    def __call__(self, *arrays: bytes) -> bytes:
        request, result = self._folder / "request", self._folder / "result"
        request.write_bytes(b"".join(array + bytes(-len(array) % 64) for array in arrays))
        place = ["-L", "/usr/aarch64-linux-gnu"]
        files = [str(file) for file in (self._driver, self.library, request, result)]
        subprocess.run([EMULATOR, *place, *files], check=True, timeout=300)
        return result.read_bytes()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _ints(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


class ArmKernel(NativeKernel):
    """The native loss kernel, computed by the library for aarch64."""

    name = "aarch64"

    def __init__(self, program: Program, threads: int = 1) -> None:
        self._program, self._threads = program, threads

    def supports(self, logits: Tensor) -> str | None:
        return None if logits.dtype in DTYPES else f"no {logits.dtype}"

    def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any) -> Any:
        need_grad = settings.pop("need_grad")
        _, nll, kl, grad = self._run(logits, targets, need_mean=False, **settings)
        return nll, kl, grad if need_grad else None

    def mean_and_grad(
        self,
        logits: Tensor,
        targets: Tensor | None,
        average: Any,
        kl_weight: float,
        smoothing: float,
    ) -> Any:
        settings = {"average": average, "kl_weight": kl_weight, "label_smoothing": smoothing}
        return self._run(logits.detach(), targets, need_mean=True, **settings)

    def _run(
        self,
        logits: Tensor,
        targets: Tensor | None,
        *,
        average: Any,
        kl_weight: float,
        label_smoothing: float,
        need_mean: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        images, views, classes = logits.shape
        if targets is None:
            targets = torch.zeros(images, dtype=torch.int64)
        given, soft = logits.dtype, targets.ndim == 2
        if soft:  # compiled only for fp32
            logits = logits.float()
        dtype = list(DTYPES).index(logits.dtype)
        numbers = (images, views, classes, self._threads, need_mean, soft)
        found = self._program(
            _ints(dtype, average_code(average), *numbers),
            np.array([kl_weight, label_smoothing], np.float32).tobytes(),
            _bytes(logits),
            _bytes(targets.float() if soft else targets),
        )
        assert np.frombuffer(found[:8], np.int64) == -1
        end = 8 + 4 * (2 * images + 1)
        values = torch.frombuffer(bytearray(found[8:end]), dtype=torch.float32)
        nll, kl, mean = values.split([images, images, 1])
        grad = torch.empty(logits.shape, dtype=logits.dtype)
        if grad.numel():
            grad = torch.frombuffer(bytearray(found[end:]), dtype=logits.dtype).view(logits.shape)
        return mean[0], nll, kl, grad.to(given)


class ArmViews(NativeViews):
    """The view engine of the CPU, computed by the library for aarch64."""

    name = "aarch64"

    def __init__(self, program: Program) -> None:
        self._program = program

    def start(
        self, pictures: Pictures, plans: ViewPlans, spec: RenderSpec, *, threads: int, **_: Any
    ) -> Any:
        views, layers = encode_views(pictures, plans), encode_layers(plans)
        images, per_image, count = plans.operations.shape
        bounds = np.cumsum([0, *pictures.row_bytes * pictures.sizes[:, 0]])
        views["pixels"] = np.repeat(bounds[:-1], per_image)  # positions in the file
        pixels = b"".join(
            ctypes.string_at(int(pointer), int(size))
            for pointer, size in zip(pictures.pointers, np.diff(bounds), strict=True)
        )
        found = self._program(
            _ints(len(views), list(DTYPES).index(spec.dtype), threads, len(pixels)),
            bytes(form_structure(spec, plans.size, count)),
            *(views.tobytes(), layers.tobytes(), pixels),
        )
        shape = (images, per_image, plans.size, plans.size, 3)
        made = torch.frombuffer(bytearray(found), dtype=spec.dtype).view(shape)
        return _Made(made.permute(0, 1, 4, 2, 3))


class _Made:
    def __init__(self, views: Tensor) -> None:
        self._views = views

    def finish(self) -> Tensor:
        return self._views
