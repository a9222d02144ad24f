"""The Triton kernel: the objective and its gradient in one pass over the logits, on a GPU."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastaug.kernels.config import Average
from fastaug.kernels.contract import is_soft, why_wrong_dtype
from fastaug.runtime.device import why_no_triton


class TritonKernel:
    """One program for each image.

    tile: the most logits that a program holds at a time, a power of two. 16,384 fp32 numbers are a
    quarter of the registers of an SM, and four numbers per logit are needed at once. An image with
    more logits is streamed in smaller tiles.
    """

    name = "triton"
    averages: tuple[Average, ...] = ("losses", "probs", "logits")  # of triton_program.py
    soft_targets = True

    def __init__(self, tile: int = 16384) -> None:
        self.tile = tile

    def supports(self, logits: Tensor) -> str | None:
        if reason := why_wrong_dtype(logits):
            return reason
        if logits.shape[1] > self.tile:
            return f"takes at most {self.tile} views, got {logits.shape[1]}; use reference"
        if not logits.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a CUDA device; use native"
        if logits.is_cuda:
            return why_no_triton()
        return None if importlib.util.find_spec("triton") else "needs Triton: pip install triton"

    def sources(self) -> tuple[Path, ...]:
        """The files that decide what this kernel computes."""
        return Path(__file__), Path(__file__).with_name("triton_program.py")

    @torch.no_grad()
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
        from fastaug.kernels import triton_program

        if logits.stride(2) != 1:
            logits = logits.contiguous()
        images, views, classes = logits.shape
        nll = torch.empty(images, dtype=torch.float32, device=logits.device)
        kl = torch.empty_like(nll)
        grad = logits.new_empty(logits.shape) if need_grad else None
        if images == 0:
            return nll, kl, grad

        soft = is_soft(targets)
        if targets is not None:
            targets = (targets.float() if soft else targets).contiguous()
        tile = Tile.of(views, classes, self.tile)
        strides = (*logits.stride()[:2], views * classes, classes)
        # Adjacent elements that a thread may load or store at once: few enough to spread the
        # classes over all threads. Then all views of a class are in one thread, and sums over views
        # need no exchange between threads.
        aligned = math.gcd(*strides, max(1, tile.classes // (32 * tile.warps)))
        with torch.cuda.device_of(logits):
            triton_program.objective_program[(images,)](
                logits,
                None if average is None else targets,
                nll,
                kl,
                grad,
                *(stride // aligned for stride in strides),
                float(kl_weight),
                float(label_smoothing),
                AVERAGE=average,
                SOFT=soft,
                KL_SLOPE=need_grad and kl_weight != 0 and views > 1,
                K=views,
                C=classes,
                K_PADDED=tile.views,
                TILE=tile.classes,
                ALIGNED=aligned,
                num_warps=tile.warps,
                # A product fused into a sum over threads would be rounded in some threads only, and
                # threads that must agree on the sum would not.
                enable_fp_fusion=False,
            )
        return nll, kl, grad


class Tile(NamedTuple):
    """Views and classes that a program holds at a time, powers of two, and its warps."""

    views: int
    classes: int
    warps: int

    @classmethod
    def of(cls, views: int, classes: int, limit: int) -> Tile:
        views, classes = power_of_two(views), power_of_two(classes)
        if views * classes > limit:
            # Smaller than the limit: the addresses in a loop also need registers.
            classes = max(1, limit // 4 // views)
        # 16 logits a thread, and 32 at 16,384.
        return cls(views, classes, min(16, max(1, views * classes // 512)))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
