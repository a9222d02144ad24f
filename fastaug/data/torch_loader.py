"""The torch loader: every image is decoded once and seen through K views, in worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fastaug.batch import ViewBatch
from fastaug.config import TrainConfig
from fastaug.data.images import ImageSet
from fastaug.data.plan import draw_plan
from fastaug.data.stream import ORDER, TEST_VIEWS, TRAIN_VIEWS, Stream
from fastaug.data.views import make_views
from fastaug.errors import CheckpointError, DataError


class TorchLoader:
    """An iterable of ViewBatch; one pass is the rest of the current epoch.

    The order of the images depends on (seed, epoch), the views of image i on (seed, epoch, i, k):
    not on workers, batch size, rank or what was loaded before. A training epoch has whole optimiser
    steps alone: the images left over are those at the end of the order, others in every epoch.
    """

    def __init__(
        self,
        images: ImageSet,
        config: TrainConfig,
        *,
        train: bool,
        images_per_batch: int,
        rank: int = 0,
        ranks: int = 1,
        pin_memory: bool = False,
    ) -> None:
        self.images = images
        self.config = config
        self.train = train
        self.epoch = 0
        self.position = 0
        """Batches of this epoch that were handed out."""
        self._per_batch = images_per_batch
        self._rank, self._ranks = rank, ranks
        whole, rest = divmod(len(images), images_per_batch * ranks)
        if train:
            self._length = whole // config.accumulate * config.accumulate
            if self._length == 0:
                raise DataError(
                    f"{images.name}: {len(images)} images are less than one optimiser step of "
                    f"{config.images_per_step} (--batch-size / --views); use a smaller --batch-size"
                )
        else:
            self._length = whole + (rest > 0)
        self._pin_memory = pin_memory

    def __len__(self) -> int:
        """Batches in an epoch; the same in every epoch."""
        return self._length

    def __iter__(self) -> Iterator[ViewBatch]:
        # New workers for every epoch: forking takes 20 ms, and none stay when a pass is broken off.
        batches: DataLoader = DataLoader(
            _ViewMaker(self.images, self.config, self.train),
            sampler=list(self.batches()),
            batch_size=None,
            num_workers=worker_count(self.config.workers),
            pin_memory=self._pin_memory,
            worker_init_fn=_leave_signals_to_trainer,
            # Its own: a pass must not draw from torch's numbers, which dropout goes on with.
            generator=torch.Generator(),
        )
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            self.position += 1
            if self.position == len(self):
                self.set_epoch(self.epoch + 1)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Start at the beginning of an epoch."""
        self.epoch, self.position = epoch, 0

    def batches(self) -> Iterator[tuple[int, np.ndarray]]:
        """(epoch, places in the data set) of each batch of this rank that is left in the epoch.

        A batch of all ranks is a run of the order, so the ranks together see what one would see.
        """
        epoch, count = self.epoch, len(self.images)
        order = Stream(self.config.seed, epoch, ORDER).permutation(count)
        order = order if self.train else np.arange(count)
        for position in range(self.position, len(self)):
            start = (position * self._ranks + self._rank) * self._per_batch
            yield epoch, order[start : start + self._per_batch]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the very batch that would have come next."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise CheckpointError(
                    f"the loader's state belongs to other data or settings: its {name} is "
                    f"{state.get(name)}, here it is {here}"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.config.seed,
            "views": self.config.views,
            "images per batch over all ranks": self._per_batch * self._ranks,
            "number of images": len(self.images),
            "data fingerprint": self.images.fingerprint,
        }


class _ViewMaker(Dataset):
    """(epoch, indices) -> ViewBatch. Runs in the workers; all that it needs comes with the key."""

    def __init__(self, images: ImageSet, config: TrainConfig, train: bool) -> None:
        self._images = images
        self._config = config
        self._purpose = TRAIN_VIEWS if train else TEST_VIEWS

    def __getitem__(self, key: tuple[int, Sequence[int]]) -> ViewBatch | DataError:
        epoch, indices = key
        config = self._config
        views = torch.empty(len(indices), config.views, config.size, config.size, 3)
        try:
            for place, index in zip(views, indices, strict=True):
                image = self._images.image(index)
                place.copy_(make_views(image, self._plans(epoch, int(index), image), config))
        except DataError as error:
            # Returned, not raised: the DataLoader would bury its one line in a worker's traceback.
            return error
        return ViewBatch(
            views.permute(0, 1, 4, 2, 3),
            torch.from_numpy(self._images.labels[indices]),
            torch.as_tensor(indices),
        )

    def _plans(self, epoch: int, index: int, image: np.ndarray) -> list:
        height, width, _ = image.shape
        return [
            draw_plan(
                Stream(self._config.seed, epoch, self._purpose, index, view),
                height,
                width,
                self._config,
            )
            for view in range(self._config.views)
        ]


def worker_count(workers: int) -> int:
    """--workers as given, or one less than the cores that this process may use, 1 to 8."""
    if workers >= 0:
        return workers
    # Containers limit the affinity, not the count; macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(8, max(1, (cores or 1) - 1))


def _leave_signals_to_trainer(_worker: int) -> None:
    """Ctrl-C, and a cluster's SIGTERM, reach the whole process group; it is the trainer who saves.

    Ctrl-C is ignored: the trainer ends its workers. SIGTERM is how multiprocessing ends them in
    the last resort, so it must end them, but as a success: torch calls a killed worker an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
