"""fastaug: image classifiers trained through K random views of every image at once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastaug.startup import guard_command

if TYPE_CHECKING:
    from fastaug.config import TrainConfig
    from fastaug.data.image_set import ImageSet
    from fastaug.engine.loaders import build_evaluation_loader, build_loader
    from fastaug.kernels.module import MultiViewLoss
    from fastaug.kernels.objective import ObjectiveTerms, objective, pairwise_kl
    from fastaug.kernels.registry import available_kernels, check_kernel, register_kernel
    from fastaug.models.build import build_model
    from fastaug.views.batch import ViewBatch
    from fastaug.views.engine import make_views, plan_views

guard_command()  # first: importing what a command needs takes seconds

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


# Imported on first use: a command then starts without torch, and the objectives need torch only,
# without Pillow and timm.
_LATER = {
    "ImageSet": "fastaug.data.image_set",
    "MultiViewLoss": "fastaug.kernels.module",
    "ObjectiveTerms": "fastaug.kernels.objective",
    "TrainConfig": "fastaug.config",
    "ViewBatch": "fastaug.views.batch",
    "available_kernels": "fastaug.kernels.registry",
    "build_evaluation_loader": "fastaug.engine.loaders",
    "build_loader": "fastaug.engine.loaders",
    "build_model": "fastaug.models.build",
    "check_kernel": "fastaug.kernels.registry",
    "make_views": "fastaug.views.engine",
    "objective": "fastaug.kernels.objective",
    "pairwise_kl": "fastaug.kernels.objective",
    "plan_views": "fastaug.views.engine",
    "register_kernel": "fastaug.kernels.registry",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'fastaug' has no attribute {name!r}")
