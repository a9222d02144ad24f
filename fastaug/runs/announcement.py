"""What a run says when it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.runtime.distributed import Group


def announcement(
    config: TrainConfig,
    train: ImageSet,
    measured: Sequence[ImageSet],
    *,
    steps_per_epoch: int,
    device: torch.device,
    group: Group,
) -> Iterator[str]:
    """Line by line: what is trained on what and where, and what one might not expect of it.

    measured: the test images, and before them those that are held out, if any are.
    """
    good, *held_out, tested = (len(images) - len(images.bad) for images in (train, *measured))
    held = f", {held_out[0]:,} held-out" if held_out else ""
    yield (
        f"{config.model.model} on {config.data.data}: {good:,} training{held} and {tested:,} test "
        f"images, {len(train.classes)} classes, {config.view.size} px"
    )
    if train.bad:
        yield (
            f"in the place of {len(train.bad)} bad training images come others, "
            "drawn in every epoch"
        )
    where = f"{group.ranks} ranks, each on {device}" if group.ranks > 1 else f"{device}"
    yield (
        f"{config.optim.epochs * steps_per_epoch:,} steps of {config.images_per_step} images x "
        f"{config.view.views} views on {where}, {config.run.precision}, "
        f"{config.data.loader} loader; run folder {config.run.out}"
    )
    left_over = len(train) - steps_per_epoch * config.images_per_step
    if left_over > 0:
        yield f"an epoch has whole steps: it leaves out {left_over} images, others each time"
    if left_over < 0:
        yield f"an epoch has whole steps: the last one repeats {-left_over} of its images"
    if config.view.augment == "none" and config.view.views > 1:
        yield "all views of an image are the same with --augment none; --views 1 costs less"
    if config.view.randaugment_policy != "nfnet" and config.view.augment != "randaugment":
        yield "--randaugment-policy has no effect without --augment randaugment"
