"""DALI's GPU decoder (nvJPEG) against the CPU's, on JPEGs made on the spot."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from fastaug.diagnostics.gpu_report.pictures import jpegs
from fastaug.diagnostics.gpu_report.recorder import Recorder, SkippedCheck, is_stand_in
from fastaug.errors import describe_error

_MEAN_LIMIT = 1.0
"""Largest mean difference of pixel values that passes: IDCT and chroma upsampling may round
differently, a wrong upsampling or color conversion is several values off."""


def decode_part(recorder: Recorder) -> None:
    columns = [("kind of JPEG", ""), ("images", ""), ("largest difference", "of 255")]
    columns += [("mean difference", "of 255"), ("values that differ", "%")]
    recorder.table("decode", "Decoded pixel values, GPU against CPU", columns)
    for kind, contents in jpegs(2 if recorder.quick else 16).items():
        with recorder.check(kind) as found:
            require_gpu_decoder()
            on_gpu, on_cpu = (decode_batch(device, contents) for device in ("gpu", "cpu"))
            assert [a.shape for a in on_gpu] == [b.shape for b in on_cpu], "the shapes differ"
            off = np.concatenate(
                [np.abs(a.astype(int) - b).ravel() for a, b in zip(on_gpu, on_cpu, strict=True)]
            )
            share = 100 * float((off > 0).mean())
            recorder.row("decode", kind, len(contents), int(off.max()), float(off.mean()), share)
            assert off.mean() <= _MEAN_LIMIT, f"pixel values differ by {off.mean():.2f} on average"
            found.append(f"at most {off.max()}, {off.mean():.3g} on average")


def decode_batch(device: str, contents: list[bytes]) -> list[np.ndarray]:
    """[H, W, 3] uint8 of each JPEG. device: "cpu" or "gpu"."""
    from fastaug.pipelines.decoder import decode_pipeline

    pipeline: Any = decode_pipeline(
        device,
        batch_size=len(contents),
        num_threads=2,
        device_id=torch.cuda.current_device() if device == "gpu" else None,
        prefetch_queue_depth=1,
    )
    pipeline.feed_input("encoded", [np.frombuffer(content, np.uint8) for content in contents])
    pipeline.schedule_run()
    (decoded,) = pipeline.outputs()
    images = decoded.as_cpu() if device == "gpu" else decoded
    return [np.array(images.at(place)) for place in range(len(contents))]


def require_gpu_decoder() -> None:
    """Skip on a stand-in GPU that DALI cannot use; on a real one, raise DALI's error."""
    if (error := _decoder_error()) is None:
        return
    if is_stand_in(torch.cuda.get_device_name()):
        raise SkippedCheck(f"DALI cannot use a stand-in GPU: {describe_error(error)}")
    raise error


@cache
def _decoder_error() -> Exception | None:
    try:
        decode_batch("gpu", jpegs(1)["gray"])
    except Exception as error:  # DALI or a broken installation may raise anything
        return error
    return None
