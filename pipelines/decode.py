"""The decoding pipeline: encoded images in, each decoded once and whole."""

from __future__ import annotations

from typing import Any

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.data_node import DataNode

from fastaug.config import TrainConfig
from fastaug.views.plan import PAD


@pipeline_def
def decode_pipeline(config: TrainConfig, device: str, padded: bool = False) -> DataNode:
    """Input "encoded": [bytes] uint8 -> [H, W, 3] uint8. padded: reflected at its edges."""
    encoded = fn.external_source(name="encoded", device="cpu", dtype=types.UINT8, ndim=1)
    memory: dict[str, Any] = {}
    if config.data.decode_memory:
        padding = config.data.decode_memory * 2**20
        memory["host_memory_padding"] = padding
        if device == "gpu":
            memory["device_memory_padding"] = padding
    images = fn.decoders.image(
        encoded,
        device="mixed" if device == "gpu" else "cpu",
        output_type=types.RGB,
        # As Pillow, torchvision and TensorFlow decode. The first is for a GPU: there DALI would
        # enlarge the colors of a JPEG in a simpler way than on a CPU.
        jpeg_fancy_upsampling=True,
        adjust_orientation=False,
        **memory,
    )
    return reflect(images, config.view.size) if padded else images


def reflect(images: DataNode, size: int) -> DataNode:
    """[size, size, 3] -> PAD pixels more on each side, mirrored without the edge itself.

    Once for an image, not for each view: DALI's own padding is with a constant.
    """
    for axis in (0, 1):
        sides = [
            fn.slice(images, start=[start], shape=[PAD], axes=[axis])
            for start in (1, size - 1 - PAD)
        ]
        first, last = (fn.flip(side, vertical=1 - axis, horizontal=axis) for side in sides)
        images = fn.cat(first, images, last, axis=axis)
    return images
