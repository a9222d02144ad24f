"""The DALI loader on a stand-in GPU: DALI's CPU pipeline makes what a GPU's would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nullgpu_client as gpu
import numpy as np
import pytest
import torch
from nvidia.dali import fn, pipeline_def, types
from training import assert_same_weights, run

from fastaug.config import TrainConfig

STAND_INS = {"devices": 2, "functional": True, "late_copies": True}
IMAGES = [np.full((2 + i, 3, 3), 10 + i, np.uint8) for i in range(3)]


@pipeline_def(batch_size=3, num_threads=1, prefetch_queue_depth=1)
def plus_one() -> Any:
    images = fn.external_source(name="images", device="gpu", dtype=types.UINT8, ndim=3)
    return fn.cast(images + 1, dtype=types.UINT8)


def outputs(stream: torch.cuda.Stream | int | None) -> Any:
    pipeline = plus_one(device_id=1)
    pipeline.feed_input("images", [torch.from_numpy(image).to("cuda:1") for image in IMAGES])
    pipeline.schedule_run()
    (made,) = pipeline.outputs(cuda_stream=stream)
    return made


def values(made: Any) -> list[np.ndarray]:
    return [torch.from_dlpack(tensor).cpu().numpy() for tensor in made]


def test_outputs_are_on_the_device_and_bound_to_the_stream() -> None:
    side = torch.cuda.Stream("cuda:1")
    made = outputs(side)
    assert made.shape() == [image.shape for image in IMAGES]
    assert gpu.selected("dali")[-1][3:5] == (1, gpu.stream_number(side))
    assert all(tensor.__dlpack_device__()[1] == 1 for tensor in made)
    before = values(made)
    assert all((found == 0xAB).all() for found in before), "torch did not wait for the stream"
    torch.cuda.current_stream("cuda:1").wait_stream(side)
    assert all(map(np.array_equal, values(made), [image + 1 for image in IMAGES]))


def test_handle_0_means_the_current_device() -> None:
    torch.zeros(1, device="cuda:0")  # torch makes no device current that has no context yet
    made = outputs(torch.cuda.default_stream("cuda:1"))
    assert gpu.selected("dali")[-1].device == 0
    assert all((found == 0xAB).all() for found in values(made))
    with torch.cuda.device(1):
        made = outputs(torch.cuda.default_stream("cuda:1"))
    assert gpu.selected("dali")[-1].device == 1
    assert all(map(np.array_equal, values(made), [image + 1 for image in IMAGES]))


@pytest.mark.parametrize("engine", ["dali", "fused"])
def test_jpeg_training_has_the_weights_of_the_cpu(
    tiny: Callable[..., TrainConfig], engine: str
) -> None:
    config = tiny(loader="dali", views_engine=engine, max_steps=2, kernel="reference", size=8)
    on_gpu = run(config.replace(device="cuda:0"), "-gpu")
    assert_same_weights(on_gpu, run(config.replace(device="cpu"), "-cpu"))
