"""The flags of the commands besides the training, as values, with every check of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from fastaug.config import TrainConfig, check_choices, flag
from fastaug.errors import ConfigError


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluate a checkpoint: everything is rebuilt from the checkpoint alone."""

    checkpoint: Annotated[str, arg(metavar="CHECKPOINT")]
    """Checkpoint file (best.pt, last.pt) or run folder (its best.pt)."""
    tta: int = -1
    """Views of each test image; 0: the central crop alone, -1: as in the run's final evaluation."""
    data: str = ""
    """Other data to evaluate on, with the same classes; default: what it was trained on."""
    batch_size: int = 256
    """Views in one forward pass."""
    loader: Literal["as-trained", "torch", "dali"] = "as-trained"
    """What decodes the images and makes the views; --dali is short for --loader dali."""
    workers: int = -1
    """Loader processes (torch) or threads (dali); -1: one less than the cores, 1 to 8."""
    device: str = "auto"
    """auto, cpu, cuda, or cuda:N."""
    precision: Literal["as-trained", "fp32", "bf16", "fp16"] = "as-trained"
    """Arithmetic of the network."""
    seed: int = 0
    """Seed of the views."""
    out: str = ""
    """Write the results to this JSON file too."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name, least in (("tta", -1), ("batch_size", 1), ("workers", -1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{flag(name)} must be at least {least}, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained network for other programs, in fp32; the file is read back and compared."""

    checkpoint: Annotated[str, arg(metavar="CHECKPOINT")]
    """Checkpoint file (best.pt, last.pt) or run folder (its best.pt)."""
    to: Literal["safetensors", "onnx", "torch-export"] = "safetensors"
    """safetensors: the weights by name, and what the network is; onnx: one file, any batch size,
    input "images", output "logits" (needs fastaug[export]); torch-export: torch.export.load's."""
    out: str = ""
    """File to write; default: beside the checkpoint, as .safetensors, .onnx or .pt2."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True)
class ScanConfig:
    """Look at every image of a data set and list those that cannot be used."""

    data: Annotated[str, arg(metavar="DATA")]
    """What --data of the training takes, or a folder of images without splits."""
    full: bool = False
    """Decode every image; else header and size, and the end of the file."""
    workers: int = -1
    """Threads that look at images; -1: four for each core, up to 32."""
    max_bad: float = 0.01
    """Largest share of bad images in a split that is no error."""
    out: str = ""
    """Write what was found to this JSON file too."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.workers < -1:
            raise ConfigError(f"--workers must be at least -1, got {self.workers}")
        if not 0 <= self.max_bad <= 1:
            raise ConfigError(f"--max-bad must be between 0 and 1, got {self.max_bad}")
        if not self.data:
            raise ConfigError("DATA is empty; give a folder, an archive, an .npz, or shapes")


@dataclass(frozen=True)
class DoctorConfig:
    """Say what works on this machine, and what to do about the rest."""

    device: str = "all"
    """Where kernels and pipelines are tried: all, cpu, cuda, or cuda:N."""
    quick: bool = False
    """Leave out how fast the kernels are."""
    json: str = ""
    """Write what was found to this JSON file too."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class PreviewConfig(TrainConfig):
    """Draw what the network will see: some images, each with its K views. Takes train's flags."""

    images: int = 8
    """Images to draw, the first of the training's order."""
    out: str = "preview.png"
    """File of the picture."""
    logdir: str = "runs/preview"
    """Folder of TensorBoard events, for the same picture; empty: none."""

    def __post_init__(self) -> None:
        if not 1 <= self.images <= 100:
            raise ConfigError(f"--images must be between 1 and 100, got {self.images}")
        # Any number of views will do here: a step has the images of the picture.
        object.__setattr__(self, "batch_size", self.images * self.views)
        object.__setattr__(self, "accumulate", 1)
        super().__post_init__()
