"""Export formats. A file is written to a temporary path, read back, compared and then renamed."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, ExportError, FastaugError, first_line
from fastaug.exporters.folding import fold_constants
from fastaug.runs.weights import model_from_safetensors, write_safetensors
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.logs import silenced
from fastaug.views.preprocessing import Preprocessing

TOLERANCE = 1e-4
"""Largest difference between two logits, relative to the largest logit. Other libraries sum in
another order: untrained models reach 3e-6, and a ViT whose activations are much larger than its
logits 3e-5."""
BATCHES = (1, 5)
"""Batch sizes that a file is checked with. It is traced with another one."""
_TRACED_BATCH = 2
_ANY_BATCH: Any = ({0: Dim("batch", min=1)},)
_ONNX_LIMIT = 2**31
"""Bytes. An ONNX file is a protobuf, which cannot be larger."""

PIXEL_SIZES = ((97, 61), (375, 500), (1, 1), (640, 480))
"""Heights and widths that a file with its own preprocessing is checked with."""

Network = Callable[[Tensor], Tensor]
Case = tuple[Tensor, Tensor]
"""What the file is given, and what the network is: [N, 3, S, S]."""


@dataclass(frozen=True)
class Format:
    """How to write a network to a file, and how a user of the file reads it.

    write: called with (file, network, preprocessing, metadata).
    packages: needed besides fastaug's own dependencies.
    takes_pixels: the file does the preprocessing: its input is uint8 [N, H, W, 3] of any size.
    """

    suffix: str
    write: Callable[[Path, nn.Module, Preprocessing, dict[str, str]], None]
    read: Callable[[Path], Network]
    packages: tuple[str, ...] = ()
    takes_pixels: bool = False


@dataclass(frozen=True)
class Exported:
    """Size of the written file, and how much its logits differ from the network's."""

    bytes: int
    difference: float
    largest_logit: float


def check_packages(to: str) -> None:
    """Raise ConfigError if a package is missing, before anything is read or traced."""
    needed = FORMATS[to].packages
    try:
        for name in needed:
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--to {to} needs {', '.join(needed)}: pip install 'fastaug[export]' ({error})"
        ) from error


def export_network(
    to: str, path: Path, model: nn.Module, config: TrainConfig, metadata: dict[str, str]
) -> Exported:
    """Write a network to a file, which is kept only if it gives the same logits when read back."""
    model = copy.deepcopy(model).float().eval()
    preprocessing = Preprocessing.from_config(config.view)
    with _temporary_file(path) as temporary:
        with _one_line_errors(f"{config.model.model} cannot be written as {to}"):
            FORMATS[to].write(temporary, model, preprocessing, metadata)
        with _one_line_errors(f"{config.model.model} cannot be run from its {to} file"):
            cases = pixel_cases if FORMATS[to].takes_pixels else image_cases
            difference, largest = compare(FORMATS[to].read(temporary), model, cases(preprocessing))
        # "not <=" instead of ">", so that NaN is refused.
        if not difference <= TOLERANCE * largest:
            raise ExportError(
                f"{path}: not written: the logits of the {to} file differ by {difference:.2g}, at "
                f"most {TOLERANCE * largest:.2g} is allowed; use another --to, and please report "
                "the model"
            )
        return Exported(temporary.stat().st_size, difference, largest)


@torch.no_grad()
def compare(network: Network, model: nn.Module, cases: Iterator[Case]) -> tuple[float, float]:
    """Largest difference between two logits, and the largest logit, over all cases."""
    differences, sizes = [], []
    for given, images in cases:
        expected, found = model(images), network(given)
        if found.shape != expected.shape:
            raise ExportError(
                f"the written file returns {list(found.shape)} for {len(images)} images, but the "
                f"network {list(expected.shape)}; use another --to"
            )
        differences.append((found - expected).abs().max())
        sizes.append(expected.abs().max())
    if not torch.stack(sizes).isfinite().all():
        raise ExportError(
            "the network's logits are not finite, so the file cannot be checked; did the training "
            "diverge? use an earlier checkpoint"
        )
    return float(torch.stack(differences).max()), float(torch.stack(sizes).max())


def image_cases(preprocessing: Preprocessing) -> Iterator[Case]:
    """Inputs of the network, which the file takes as they are."""
    for count in BATCHES:
        images = random_images(count, preprocessing)
        yield images, images


def pixel_cases(preprocessing: Preprocessing) -> Iterator[Case]:
    """Pixels that the file takes, and what the preprocessing makes of them."""
    generator = np.random.default_rng(0)
    for count, (height, width) in zip(cycle(BATCHES), PIXEL_SIZES, strict=False):
        pixels = generator.integers(0, 256, (count, height, width, 3), np.uint8)
        yield torch.from_numpy(pixels), torch.stack([preprocessing.apply(own) for own in pixels])


def random_images(count: int, preprocessing: Preprocessing) -> Tensor:
    """[count, 3, S, S] fp32: random pixels, normalized as in training; the same in each call."""
    generator = torch.Generator().manual_seed(count)
    size = preprocessing.size
    pixels = 255 * torch.rand(count, 3, size, size, generator=generator)
    mean, std = (torch.tensor(v)[:, None, None] for v in (preprocessing.mean, preprocessing.std))
    return (pixels - mean) / std


@contextlib.contextmanager
def _temporary_file(path: Path) -> Iterator[Path]:
    """A temporary file that replaces path at the end. OSErrors become an ExportError."""
    try:
        with atomic_write(path, path.suffix) as temporary:  # torch.export needs the suffix
            yield temporary
    except OSError as error:
        raise ExportError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "free some space, fix the permissions, or give another --out"
        ) from error


@contextlib.contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Turn any error of an exporter into an ExportError, and hide its warnings."""
    try:
        with silenced():
            yield
    except (OSError, FastaugError):
        raise
    except Exception as error:  # tracing runs the model's own code, and may raise anything
        raise ExportError(
            f"{what} ({first_line(error)}); --to safetensors works for every model, --debug shows "
            "the traceback"
        ) from error


def _write_safetensors(
    path: Path, model: nn.Module, _preprocessing: Preprocessing, metadata: dict[str, str]
) -> None:
    write_safetensors(path, model.state_dict(), metadata)


def _read_safetensors(path: Path) -> Network:
    return model_from_safetensors(path).model


def _trace(model: nn.Module, images: Tensor) -> ExportedProgram:
    """Program for any batch size, with constants folded."""
    # A program records strides, and readers expect contiguous ones.
    model = model.to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=_ANY_BATCH)
        folded = fold_constants(program.module())
        return torch.export.export(folded, (images,), dynamic_shapes=_ANY_BATCH)


def _write_program(
    path: Path, model: nn.Module, preprocessing: Preprocessing, metadata: dict[str, str]
) -> None:
    program = _trace(copy.deepcopy(model), random_images(_TRACED_BATCH, preprocessing))
    torch.export.save(program, path, extra_files={"fastaug.json": json.dumps(metadata)})


def _read_program(path: Path) -> Network:
    return torch.export.load(path).module()


def _write_onnx(
    path: Path, model: nn.Module, preprocessing: Preprocessing, metadata: dict[str, str]
) -> None:
    program = _onnx_program(model, preprocessing)
    program.model.metadata_props.update(metadata)
    program.save(path, external_data=False)


def _write_onnx_with_preprocessing(
    path: Path, model: nn.Module, preprocessing: Preprocessing, metadata: dict[str, str]
) -> None:
    import onnx

    from fastaug.exporters.onnx_preprocessing import add_preprocessing

    proto = add_preprocessing(_onnx_program(model, preprocessing).model_proto, preprocessing)
    onnx.helper.set_model_props(proto, metadata | {"input": "RGB pixels, uint8 [N, H, W, 3]"})
    onnx.save(proto, path)


def _onnx_program(model: nn.Module, preprocessing: Preprocessing) -> torch.onnx.ONNXProgram:
    size = sum(weight.nbytes for weight in model.state_dict().values())
    if size >= _ONNX_LIMIT:
        raise ExportError(
            f"weights of {size / 2**30:.1f} GiB do not fit into an ONNX file, which can have at "
            "most 2 GiB; use --to safetensors or torch-export"
        )
    images = random_images(_TRACED_BATCH, preprocessing)
    program = torch.onnx.export(
        _trace(copy.deepcopy(model), images),
        (images,),
        dynamo=True,
        verbose=False,
        dynamic_shapes=_ANY_BATCH,
        input_names=["images"],
        output_names=["logits"],
    )
    assert program is not None  # None only without dynamo=True
    return program


def _read_onnx(path: Path) -> Network:
    import onnxruntime

    return onnx_network(onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]))


def onnx_network(session: Any) -> Network:
    """session: onnxruntime's."""
    (taken,) = session.get_inputs()

    def network(images: Tensor) -> Tensor:
        (logits,) = session.run(["logits"], {taken.name: images.numpy()})
        return torch.from_numpy(logits)

    return network


_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
FORMATS = {
    "safetensors": Format(".safetensors", _write_safetensors, _read_safetensors),
    "onnx": Format(".onnx", _write_onnx, _read_onnx, _ONNX_PACKAGES),
    "onnx-with-preprocessing": Format(
        ".onnx", _write_onnx_with_preprocessing, _read_onnx, _ONNX_PACKAGES, takes_pixels=True
    ),
    "torch-export": Format(".pt2", _write_program, _read_program),
}
