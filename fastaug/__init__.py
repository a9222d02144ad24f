"""fastaug: image classifiers trained through K random views of every image at once."""

from pathlib import Path

from fastaug.batch import ViewBatch
from fastaug.config import TrainConfig
from fastaug.kernels import available_kernels, check_kernel, register_kernel
from fastaug.objectives import ObjectiveTerms, objective, pairwise_kl

# Installed, fastaug.pipelines lies in this folder; in a source tree it is the folder beside it, and
# Python takes the tree that it is started in before the one that is installed.
if (_beside := Path(__file__).parents[1] / "pipelines").joinpath("loader.py").is_file():
    __path__.append(str(_beside.parent))

__version__ = "0.1.0"
__all__ = [
    "ObjectiveTerms",
    "TrainConfig",
    "ViewBatch",
    "available_kernels",
    "build_loader",
    "build_model",
    "check_kernel",
    "objective",
    "pairwise_kl",
    "register_kernel",
]


def __getattr__(name: str) -> object:
    # On first use: the objectives then need torch alone, without Pillow and timm.
    if name == "build_loader":
        from fastaug.loaders import build_loader

        return build_loader
    if name == "build_model":
        from fastaug.models import build_model

        return build_model
    raise AttributeError(f"module 'fastaug' has no attribute {name!r}")
