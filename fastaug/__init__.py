"""fastaug: image classifiers trained through K random views of every image at once."""

from importlib import import_module
from pathlib import Path
from typing import Any

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
    "make_views",
    "objective",
    "pairwise_kl",
    "plan_views",
    "register_kernel",
]


# Imported on first use: the objectives then need torch alone, without Pillow and timm.
_LATER = {
    "build_loader": "fastaug.loaders",
    "build_model": "fastaug.models",
    "make_views": "fastaug.views",
    "plan_views": "fastaug.views",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'fastaug' has no attribute {name!r}")
