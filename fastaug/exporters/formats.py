"""A trained network as a file for other programs: written, read back, compared, put in place."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import logging
import warnings
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
from fastaug.runs.weights import model_from_safetensors, write_safetensors
from fastaug.runtime.atomic import atomic_write
from fastaug.views.reference import NORMALIZATION

TOLERANCE = 1e-4
"""Largest difference of two logits, as a share of the largest logit. Other libraries add up in
another order: models as they begin are at 3e-6, and a ViT whose activations dwarf its logits at
3e-5."""
BATCHES = (1, 5)
"""Sizes of the batches that a file is checked with; it is traced with another one."""
_TRACED_BATCH = 2
_ANY_BATCH: Any = ({0: Dim("batch", min=1)},)
_ONNX_LIMIT = 2**31
"""Bytes: a protobuf cannot be larger, and an ONNX file is one."""

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """How a network is written to a file, and read from it as whoever gets the file would.

    write: (file, network, images [2, 3, S, S] to trace it with, metadata).
    """

    suffix: str
    write: Callable[[Path, nn.Module, Tensor, dict[str, str]], None]
    read: Callable[[Path], Network]
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its logits are from the network's."""

    bytes: int
    difference: float
    largest_logit: float


def check_packages(to: str) -> None:
    """Before anything is read or traced."""
    needed = FORMATS[to].packages
    try:
        for name in needed:
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--to {to} needs {', '.join(needed)}; try: pip install fastaug[export] ({error})"
        ) from error


def export_network(
    to: str, path: Path, model: nn.Module, config: TrainConfig, metadata: dict[str, str]
) -> Exported:
    """Write a network as a file that has been read back and gives the same logits, or none."""
    model = copy.deepcopy(model).float().eval()
    with _writable(path) as temporary:
        with _explained(f"{config.model.model} cannot be written as {to}"):
            FORMATS[to].write(temporary, model, random_images(_TRACED_BATCH, config), metadata)
        with _explained(f"{config.model.model} cannot be run from its {to} file"):
            difference, largest = compare(FORMATS[to].read(temporary), model, config)
        # Written so that what is no number is too large.
        if not difference <= TOLERANCE * largest:
            raise ExportError(
                f"{path}: not written, the {to} file's logits are off by {difference:.2g} of "
                f"{largest:.2g}, where {TOLERANCE:g} of that is allowed; take another --to, "
                "and please report the model"
            )
        return Exported(temporary.stat().st_size, difference, largest)


@torch.no_grad()
def compare(network: Network, model: nn.Module, config: TrainConfig) -> tuple[float, float]:
    """(largest difference of two logits, largest logit) over batches of random images."""
    differences, sizes = [], []
    for count in BATCHES:
        images = random_images(count, config)
        expected, found = model(images), network(images)
        if found.shape != expected.shape:
            raise ExportError(
                f"the written file gives {list(found.shape)} for {count} images, "
                f"the network {list(expected.shape)}; take another --to"
            )
        differences.append((found - expected).abs().max())
        sizes.append(expected.abs().max())
    if not torch.stack(sizes).isfinite().all():
        raise ExportError(
            "the network's logits are not finite, so no file can be checked against them; "
            "did the training diverge? take an earlier checkpoint"
        )
    return float(torch.stack(differences).max()), float(torch.stack(sizes).max())


def random_images(count: int, config: TrainConfig) -> Tensor:
    """[count, 3, S, S] fp32: random levels, normalized as in training; always the same ones."""
    generator = torch.Generator().manual_seed(count)
    levels = 255 * torch.rand(count, 3, config.view.size, config.view.size, generator=generator)
    mean, deviation = (torch.tensor(v)[:, None, None] for v in NORMALIZATION[config.view.normalize])
    return (levels - mean) / deviation


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[Path]:
    """A temporary file that takes the path's place in the end; a full disk in one line."""
    try:
        with atomic_write(path, path.suffix) as temporary:  # torch.export goes by the suffix
            yield temporary
    except OSError as error:
        raise ExportError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "free some space or mend the permissions, or give another --out"
        ) from error


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Any error of an exporter in one line, and none of its remarks to its own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, FastaugError):
        raise
    except Exception as error:  # tracing runs the model's own code, and may raise anything
        raise ExportError(
            f"{what} ({first_line(error)}); --to safetensors takes every model, --debug shows where"
        ) from error
    finally:
        logging.disable(before)


def _write_safetensors(
    path: Path, model: nn.Module, _images: Tensor, metadata: dict[str, str]
) -> None:
    write_safetensors(path, model.state_dict(), metadata)


def _trace(model: nn.Module, images: Tensor) -> ExportedProgram:
    """A program for any number of images, which computes nothing twice that is always the same."""
    # A program remembers strides, and readers expect the usual ones.
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
            f"weights of {size / 2**30:.1f} GiB do not fit into one ONNX file, which ends at 2 "
            "GiB; use --to safetensors or torch-export"
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
    assert program is not None  # None is for the exporter before dynamo
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
