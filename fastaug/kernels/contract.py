"""What a loss kernel is."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Average = Literal["losses", "probs", "logits"]


class Kernel(Protocol):
    """Computes the objective of every image and its gradient. Anything with these three will do."""

    name: str

    def supports(self, logits: Tensor) -> str | None:
        """None, or why this kernel cannot take these logits here."""

    def value_and_grad(
        self,
        logits: Tensor,
        targets: Tensor | None,
        *,
        average: Average | None,
        kl_weight: float,
        label_smoothing: float,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """logits: [B, K, C], targets: [B] int64 -> nll: [B], kl: [B], grad: [B, K, C] or None.

        grad is the gradient of nll_b + kl_weight * kl_b for each image b. average=None is the
        regulariser alone: no targets, nll is zero. Values are fp32 for fp32, fp16 and bf16 logits;
        grad has the dtype of the logits.
        """
