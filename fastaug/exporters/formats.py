"""Export formats. A file is written to a temporary path, read back, compared and then renamed."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, ExportError, FastaugError, first_line
from fastaug.exporters.folding import fold_constants
from fastaug.normalization import pixel_statistics
from fastaug.runs.weights import model_from_safetensors, write_safetensors
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.logs import silenced

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

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """How to write a network to a file, and how a user of the file reads it.

    write: called with (file, network, images [2, 3, S, S] for tracing, metadata).
    packages: needed besides fastaug's own dependencies.
    """

    suffix: str
    write: Callable[[Path, nn.Module, Tensor, dict[str, str]], None]
    read: Callable[[Path], Network]
    packages: tuple[str, ...] = ()


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
    with _temporary_file(path) as temporary:
        with _one_line_errors(f"{config.model.model} cannot be written as {to}"):
            FORMATS[to].write(temporary, model, random_images(_TRACED_BATCH, config), metadata)
        with _one_line_errors(f"{config.model.model} cannot be run from its {to} file"):
            difference, largest = compare(FORMATS[to].read(temporary), model, config)
        # "not <=" instead of ">", so that NaN is refused.
        if not difference <= TOLERANCE * largest:
            raise ExportError(
                f"{path}: not written: the logits of the {to} file differ by {difference:.2g}, at "
                f"most {TOLERANCE * largest:.2g} is allowed; use another --to, and please report "
                "the model"
            )
        return Exported(temporary.stat().st_size, difference, largest)


@torch.no_grad()
def compare(network: Network, model: nn.Module, config: TrainConfig) -> tuple[float, float]:
    """Largest difference between two logits, and the largest logit, over random images."""
    differences, sizes = [], []
    for count in BATCHES:
        images = random_images(count, config)
        expected, found = model(images), network(images)
        if found.shape != expected.shape:
            raise ExportError(
                f"the written file returns {list(found.shape)} for {count} images, but the network "
                f"{list(expected.shape)}; use another --to"
            )
        differences.append((found - expected).abs().max())
        sizes.append(expected.abs().max())
    if not torch.stack(sizes).isfinite().all():
        raise ExportError(
            "the network's logits are not finite, so the file cannot be checked; did the training "
            "diverge? use an earlier checkpoint"
        )
    return float(torch.stack(differences).max()), float(torch.stack(sizes).max())


def random_images(count: int, config: TrainConfig) -> Tensor:
    """[count, 3, S, S] fp32: random pixels, normalized as in training; the same in each call."""
    generator = torch.Generator().manual_seed(count)
    pixels = 255 * torch.rand(count, 3, config.view.size, config.view.size, generator=generator)
    mean, deviation = (
        torch.tensor(v)[:, None, None] for v in pixel_statistics(config.view.normalize)
    )
    return (pixels - mean) / deviation


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
    path: Path, model: nn.Module, _images: Tensor, metadata: dict[str, str]
) -> None:
    write_safetensors(path, model.state_dict(), metadata)


def _trace(model: nn.Module, images: Tensor) -> ExportedProgram:
    """Program for any batch size, with constants folded."""
    # A program records strides, and readers expect contiguous ones.
    model = model.to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=_ANY_BATCH)
        folded = fold_constants(program.module())
        return torch.export.export(folded, (images,), dynamic_shapes=_ANY_BATCH)


def _write_program(path: Path, model: nn.Module, images: Tensor, metadata: dict[str, str]) -> None:
    extra = {"fastaug.json": json.dumps(metadata)}
    torch.export.save(_trace(copy.deepcopy(model), images), path, extra_files=extra)


def _read_program(path: Path) -> Network:
    return torch.export.load(path).module()


def _write_onnx(path: Path, model: nn.Module, images: Tensor, metadata: dict[str, str]) -> None:
    size = sum(weight.nbytes for weight in model.state_dict().values())
    if size >= _ONNX_LIMIT:
        raise ExportError(
            f"weights of {size / 2**30:.1f} GiB do not fit into an ONNX file, which can have at "
            "most 2 GiB; use --to safetensors or torch-export"
        )
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
    program.model.metadata_props.update(metadata)
    program.save(path, external_data=False)


def _read_onnx(path: Path) -> Network:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def network(images: Tensor) -> Tensor:
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        return torch.from_numpy(logits)

    return network


FORMATS = {
    "safetensors": Format(".safetensors", _write_safetensors, model_from_safetensors),
    "onnx": Format(".onnx", _write_onnx, _read_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "torch-export": Format(".pt2", _write_program, _read_program),
}
