"""Trained networks for predictions, from a checkpoint or from any exported file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError, ConfigError, first_line
from fastaug.exporters.formats import FORMATS, Network, onnx_network
from fastaug.runs.checkpoint import checkpoint_file, load_checkpoint
from fastaug.runs.weights import (
    check_description,
    model_from_checkpoint,
    model_from_safetensors,
    read_metadata,
)
from fastaug.runtime.device import memory_bound
from fastaug.runtime.logs import silenced


@dataclass(frozen=True)
class LoadedNetwork:
    """A network that can only predict."""

    path: str
    network: Network
    """Tensors on the CPU: [N, 3, S, S] fp32, or pixels -> logits [N, C] fp32."""
    classes: tuple[str, ...]
    config: TrainConfig
    """The settings of its training."""
    takes_pixels: bool = False
    """Its input is uint8 [N, H, W, 3] of any size, which it preprocesses itself."""

    def logits(self, images: Tensor) -> Tensor:
        """[N, C], checked: a file may compute anything."""
        try:
            found = self.network(images)
        except Exception as error:  # torch and onnxruntime have many
            raise CheckpointError(
                f"{self.path}: cannot run on {list(images.shape)} ({first_line(error)})"
            ) from error
        if found.shape != (len(images), len(self.classes)) or found.dtype != torch.float32:
            raise CheckpointError(
                f"{self.path}: returned {found.dtype} {list(found.shape)} for {len(images)} images "
                f"and {len(self.classes):,} classes"
            )
        return found


def load_network(named: str, device: torch.device, *, trust: bool = False) -> LoadedNetwork:
    """named: a checkpoint, a run folder (its best.pt), or a file of fastaug.export.

    device: where the network runs; ONNX runs on the CPU.
    trust: allow a .pt2 file, which can run any code when it is loaded.
    """
    path = checkpoint_file(named)
    load = _LOADERS.get(path.suffix)
    if load is None:
        return _from_checkpoint(path, device)
    if not path.is_file():  # a pipe may block
        raise CheckpointError(f"{path}: no such file; name a checkpoint, a run folder or an export")
    if (size := path.stat().st_size) > memory_bound():
        raise CheckpointError(
            f"{path}: {size:,} bytes, over a third of the memory; load it on a larger machine"
        )
    if path.suffix == ".pt2" and not trust:
        raise ConfigError(
            f"{path}: loading a .pt2 can run code that it contains; add --trust if you know who "
            "wrote it, or use the .safetensors or .onnx of the same network"
        )
    return load(path, device)


def _from_checkpoint(path: Path, device: torch.device) -> LoadedNetwork:
    state = load_checkpoint(path)
    config, classes = check_description(state["config"], state.get("classes"), str(path))
    model = model_from_checkpoint(state).eval()
    return LoadedNetwork(str(path), _on_device(model, device), classes, config)


def _from_safetensors(path: Path, device: torch.device) -> LoadedNetwork:
    trained = model_from_safetensors(path)
    return LoadedNetwork(
        str(path), _on_device(trained.model, device), trained.classes, trained.config
    )


def _from_onnx(path: Path, _device: torch.device) -> LoadedNetwork:
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(f"{path} needs onnxruntime: pip install onnxruntime ({error})") from error
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class for each kind of damage
        raise CheckpointError(f"{path}: cannot be read as ONNX ({first_line(error)})") from error
    config, classes = read_metadata(session.get_modelmeta().custom_metadata_map, str(path))
    takes_pixels = session.get_inputs()[0].type == "tensor(uint8)"
    return LoadedNetwork(str(path), onnx_network(session), classes, config, takes_pixels)


def _from_program(path: Path, device: torch.device) -> LoadedNetwork:
    extra = {"fastaug.json": ""}
    try:
        with silenced():
            module = torch.export.load(path, extra_files=extra).module()
        metadata = json.loads(extra["fastaug.json"])
    except Exception as error:  # torch raises almost anything for a damaged file
        raise CheckpointError(
            f"{path}: not a .pt2 that fastaug.export wrote ({first_line(error)})"
        ) from error
    config, classes = read_metadata(metadata, str(path))
    return LoadedNetwork(str(path), _on_device(module, device), classes, config)


def _on_device(model: nn.Module, device: torch.device) -> Network:
    """The model as a function of tensors on the CPU."""
    model = model.to(device)

    @torch.inference_mode()
    def network(images: Tensor) -> Tensor:
        return model(images.to(device)).float().cpu()

    return network


_LOADERS: dict[str, Callable[[Path, torch.device], LoadedNetwork]] = {
    FORMATS["safetensors"].suffix: _from_safetensors,
    FORMATS["onnx"].suffix: _from_onnx,
    FORMATS["torch-export"].suffix: _from_program,
}
