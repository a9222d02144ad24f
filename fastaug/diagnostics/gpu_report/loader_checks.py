"""Checks of the DALI loader on a GPU: its batches against those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastaug
from fastaug.config import TrainConfig
from fastaug.diagnostics.gpu_report.decode import require_gpu_decoder
from fastaug.diagnostics.gpu_report.pictures import shape_folder, small_training
from fastaug.diagnostics.gpu_report.recorder import Check
from fastaug.engine.trainer import Trainer

_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"crop": "pad", "size": 64},
    {"views_dtype": "fp16", "precision": "fp16"},
    {"augment": "randaugment", "randaugment_magnitude": 7.0},
    {"augment": "randaugment", "randaugment_policy": "dali"},
    {"views_engine": "fused"},
    {"views_engine": "dali"},
)


def loader_checks(folder: Path) -> Iterator[Check]:
    """folder: an empty one, for the data and the runs."""
    data = shape_folder(folder / "shapes", train=8, test=2)
    tiny = partial(small_training, data, size=16, views=2, batch_size=16, epochs=2, loader="dali")
    for changes in _SETTINGS:
        text = ", ".join(f"{name}={value}" for name, value in changes.items()) or "defaults"
        config = tiny(folder / "unused", **changes)
        quick = changes == {"views_engine": "dali"}  # needs no admission check
        yield Check(f"views are those of the CPU: {text}", partial(_as_on_cpu, config), quick)
    for dtype in ("fp32", "bf16"):
        config = tiny(folder / "unused", views_dtype=dtype, precision="bf16")
        yield Check(f"both engines make the same views, {dtype}", partial(_both_engines, config))
    yield Check("batches that are kept do not change", partial(_kept, tiny(folder / "unused")))
    config = tiny(folder / "resumed", augment="randaugment", precision="bf16", device="cuda")
    yield Check("a resumed run ends as an uninterrupted one", partial(_resumed, config))
    for augment in ("crop-flip", "randaugment"):
        config = tiny(folder / "unused", augment=augment, crop="pad", size=32, normalize="cifar")
        check = partial(_in_memory, config, folder / f"{augment}.npz")
        yield Check(f"a data set in GPU memory, {augment}", check)


def _as_on_cpu(config: TrainConfig) -> str:
    require_gpu_decoder()
    on_gpu, on_cpu = (
        list(fastaug.build_loader(config.replace(device=device))) for device in ("cuda", "cpu")
    )
    differing = []
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours.views.is_cuda
        assert ours.flat.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(ours.indices.cpu(), theirs.indices)
        off = (ours.views.float().cpu() - theirs.views.float()).abs()
        differing.append(off.flatten(2).mean(-1))
    # A pixel value is 0.017. nvJPEG rounds differently from libjpeg, and posterizing amplifies it.
    limit = 0.15 if config.view.augment == "randaugment" else 0.03
    median = torch.cat(differing).median().item()
    assert median < limit, f"the median view differs by {median:.3g}, more than {limit}"
    return f"the median view differs by {median:.2g}; a pixel value is 0.017"


def _both_engines(config: TrainConfig) -> None:
    require_gpu_decoder()
    fused, operators = (
        list(fastaug.build_loader(config.replace(device="cuda", views_engine=name)))
        for name in ("fused", "dali")
    )
    for one, other in zip(fused, operators, strict=True):
        assert torch.equal(one.indices, other.indices)
        # 0.15 of a pixel value, and the rounding of bf16.
        torch.testing.assert_close(one.views.float(), other.views.float(), rtol=0, atol=2e-2)


def _kept(config: TrainConfig) -> None:
    require_gpu_decoder()
    check_kept_batches(config.replace(device="cuda"))


def check_kept_batches(config: TrainConfig) -> None:
    """The loader must not write over batches that its caller keeps."""
    loader = fastaug.build_loader(config)
    kept, copies = [], []
    for _ in range(3):
        for batch in loader:
            kept.append(batch.views)
            copies.append(batch.views.clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


def _resumed(config: TrainConfig) -> None:
    require_gpu_decoder()
    whole = config.replace(out=f"{config.run.out}-whole")
    Trainer(whole).fit()
    Trainer(config.replace(max_steps=5)).fit()
    Trainer(config, Path(config.run.out) / "last.pt").fit()
    ours, theirs = (torch.load(Path(c.run.out) / "last.pt")["model"] for c in (config, whole))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)


def _in_memory(config: TrainConfig, file: Path) -> None:
    """Needs no decoder: the images are in GPU memory, and the views equal those of the CPU."""
    random = np.random.default_rng(0)
    sets: dict[str, Any] = {}
    for split, count in (("", 16), ("test_", 4)):
        sets[f"{split}images"] = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
        sets[f"{split}labels"] = np.arange(count) % 4
    np.savez(file, **sets)
    config = config.replace(data=str(file), views_engine="fused", batch_size=8)
    ours, theirs = (
        list(fastaug.build_loader(config.replace(device=device))) for device in ("cuda", "cpu")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.views.is_cuda
        assert torch.equal(one.views.cpu(), other.views)
        assert torch.equal(one.labels.cpu(), other.labels)
