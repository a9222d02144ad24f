"""fastaug: image classifiers trained through K random views of every image at once."""

from importlib import import_module
from typing import Any

from fastaug.config import TrainConfig
from fastaug.kernels.module import MultiViewLoss
from fastaug.kernels.objective import ObjectiveTerms, objective, pairwise_kl
from fastaug.kernels.registry import available_kernels, check_kernel, register_kernel
from fastaug.views.batch import ViewBatch

__version__ = "0.2.0"
__all__ = [
    "ImageSet",
    "MultiViewLoss",
    "ObjectiveTerms",
    "TrainConfig",
    "ViewBatch",
    "available_kernels",
    "build_evaluation_loader",
    "build_loader",
    "build_model",
    "check_kernel",
    "make_views",
    "objective",
    "pairwise_kl",
    "plan_views",
    "register_kernel",
]


# Imported on first use: the objectives then need torch only, without Pillow and timm.
_LATER = {
    "ImageSet": "fastaug.data.image_set",
    "build_evaluation_loader": "fastaug.engine.loaders",
    "build_loader": "fastaug.engine.loaders",
    "build_model": "fastaug.models.build",
    "make_views": "fastaug.views.engine",
    "plan_views": "fastaug.views.engine",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'fastaug' has no attribute {name!r}")
