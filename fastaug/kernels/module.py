"""The training loss as a torch module over flat logits, for people's own training loops."""

from __future__ import annotations

import operator
from typing import Literal, get_args

from torch import Tensor, nn

from fastaug.errors import ConfigError
from fastaug.kernels.config import Average
from fastaug.kernels.contract import Kernel
from fastaug.kernels.objective import ObjectiveTerms, check_options, objective

Order = Literal["images", "views"]
"""The rows of a flat batch: all views of an image adjacent, or all images of a view adjacent."""


class MultiViewLoss(nn.Module):
    """logits: [B*K, C], targets: [B] int64, or [B, C] if soft -> the training loss, a scalar.

    The same as `objective(logits.unflatten(0, (-1, K)), targets, ...).loss`.

    views: K, the number of views of each image.
    order: "images" if the K views of an image are adjacent in the batch, as in
    `views.flatten(0, 1)`; "views" if all first views come first, then all second ones, as in
    timm's augmentation splits and in `torch.cat([first_views, second_views])`.
    average, kl_weight, label_smoothing, kernel: as in `objective`.
    """

    def __init__(
        self,
        views: int,
        *,
        average: Average = "losses",
        kl_weight: float = 1.0,
        label_smoothing: float = 0.0,
        order: Order = "images",
        kernel: str | Kernel = "auto",
    ) -> None:
        super().__init__()
        check_options(average, kl_weight, label_smoothing)
        if order not in get_args(Order):
            raise ConfigError(f"order must be images or views, got {order!r}")
        self.views = _number_of_views(views)
        self.average: Average = average
        self.kl_weight = kl_weight
        self.label_smoothing = label_smoothing
        self.order: Order = order
        self.kernel = kernel

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.terms(logits, targets).loss

    def terms(self, logits: Tensor, targets: Tensor) -> ObjectiveTerms:
        """The loss with its parts: loss [], nll [B] and kl [B]. Only loss has a gradient."""
        return objective(
            self._by_image(logits, targets),
            targets,
            average=self.average,
            kl_weight=self.kl_weight,
            label_smoothing=self.label_smoothing,
            kernel=self.kernel,
        )

    def extra_repr(self) -> str:
        kernel = self.kernel if isinstance(self.kernel, str) else self.kernel.name
        return (
            f"views={self.views}, average={self.average!r}, kl_weight={self.kl_weight:g}, "
            f"label_smoothing={self.label_smoothing:g}, order={self.order!r}, kernel={kernel!r}"
        )

    def _by_image(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[B*K, C] -> [B, K, C], a view of the same memory: the kernels take any strides."""
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            given = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else repr(logits)
            raise ConfigError(
                f"MultiViewLoss takes logits [images * views, classes], got {given}; "
                "for [images, views, classes] use fastaug.objective"
            )
        rows, views = len(logits), self.views
        if rows % views:
            raise ConfigError(
                f"MultiViewLoss(views={views}) got logits of {rows} rows, which is not a multiple "
                f"of {views}: give all {views} views of each image"
            )
        images = rows // views
        is_batch = isinstance(targets, Tensor) and targets.ndim > 0
        if is_batch and images != len(targets) == rows:
            short = f"targets[::{views}]" if self.order == "images" else f"targets[:{images}]"
            raise ConfigError(
                f"MultiViewLoss(views={views}) takes {images} targets, one for each image, got "
                f"{rows}, one for each view: give {short}"
            )
        if self.order == "images":
            return logits.unflatten(0, (images, views))
        return logits.unflatten(0, (views, images)).transpose(0, 1)


def _number_of_views(views: int) -> int:
    try:
        number = operator.index(views)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"views must be a whole number, at least 1, got {views!r}")
    return number
