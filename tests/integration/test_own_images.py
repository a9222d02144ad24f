"""build_loader with images of one's own: lists of files, and torch Datasets of all kinds of items.

The loader of the same images in class folders is the oracle.
"""

from __future__ import annotations

import io
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

import fastaug
from fastaug.config import TrainConfig
from fastaug.data.dataset_images import DatasetImages
from fastaug.data.image_set import ImageSet
from fastaug.errors import ConfigError, DataError

Tiny = Callable[..., TrainConfig]
both_loaders = pytest.mark.parametrize("loader", ["torch", "dali"])
pytestmark = pytest.mark.usefixtures("own_cache")


class Own(Dataset):
    """Items of any kind, without lists of labels or classes; some of them fail."""

    def __init__(self, items: list[Any], failing: dict[int, Exception] | None = None) -> None:
        self.items, self.failing, self.reads = items, failing or {}, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if index in self.failing:
            raise self.failing[index]
        return self.items[index]


def files_of(folder: Path) -> list[tuple[Path, str]]:
    return [(path, path.parent.name) for path in sorted((folder / "train").rglob("*.jpg"))]


def pixels_of(folder: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)) for path, _ in files_of(folder)]


def as_bytes(path: Path) -> bytes:
    return path.read_bytes()


def as_view(path: Path) -> memoryview:
    return memoryview(path.read_bytes())


def as_pil(path: Path) -> Image.Image:
    return Image.open(path)


def as_tensor(path: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


def as_tensor_channels_last(path: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(path)))


def as_array(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


KINDS = [as_bytes, as_view, as_pil, as_tensor, as_tensor_channels_last, as_array]


def own(folder: Path, kind: Callable[[Path], Any] = as_bytes, **changes: Any) -> Own:
    """The images of the color folders, with labels 0 to 2."""
    labels = {"blue": 0, "green": 1, "red": 2}
    return Own([(kind(path), labels[name]) for path, name in files_of(folder)], **changes)


def all_batches(loader: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(b.views.float().clone(), b.labels.clone(), b.indices.clone()) for b in loader]


def assert_same(ours: Any, theirs: Any) -> None:
    first, second = all_batches(ours), all_batches(theirs)
    assert len(first) == len(second) > 0
    for mine, expected in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@both_loaders
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_item_gives_the_views_of_the_folder(
    kind: Callable, loader: str, tiny: Tiny, folder: Path
) -> None:
    config = tiny(loader=loader)
    assert_same(fastaug.build_loader(config, own(folder, kind)), fastaug.build_loader(config))


@both_loaders
def test_a_list_of_files(loader: str, tiny: Tiny, folder: Path) -> None:
    config = tiny(loader=loader)
    ours = fastaug.build_loader(config, files_of(folder))
    assert ours.images.classes == ("blue", "green", "red")
    assert_same(ours, fastaug.build_loader(config))


def test_files_and_numbers(folder: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths relative to the current folder, classes in an order of one's own."""
    monkeypatch.chdir(folder / "train")
    names = ["red", "blue", "green"]
    paths = [str(path.relative_to(folder / "train")) for path, _ in files_of(folder)]
    labels = [names.index(path.split("/")[0]) for path in paths]
    numbered = ImageSet.from_files(paths, labels, names)
    named = ImageSet.from_files(paths, [path.split("/")[0] for path in paths], names)
    for images in (numbered, named):
        assert images.classes == ("red", "blue", "green")
        assert images.labels.tolist() == labels
    batch = next(iter(fastaug.build_loader(tiny(), numbered)))
    assert batch.labels.tolist() == [labels[index] for index in batch.indices]
    assert ImageSet.from_files(paths, np.array(labels)).classes == ("0", "1", "2")


def test_the_evaluation_of_own_images(folder: Path, tiny: Tiny) -> None:
    loader = fastaug.build_evaluation_loader(tiny(), own(folder, as_pil), views=0, batch_size=8)
    found = all_batches(loader)
    assert torch.cat([indices for _, _, indices in found]).tolist() == list(range(36))
    assert all(views.shape[1] == 1 for views, _, _ in found)
    with raises(ConfigError, "TrainConfig"):
        fastaug.build_evaluation_loader({}, own(folder))  # type: ignore[arg-type]


class TestKnownDatasets:
    def test_image_folder(self, folder: Path, tiny: Tiny) -> None:
        images = ImageFolder(str(folder / "train"))
        ours = fastaug.build_loader(tiny(), images)
        assert ours.images.classes == ("blue", "green", "red")
        assert_same(ours, fastaug.build_loader(tiny()))

    def test_a_part_of_a_dataset(
        self, folder: Path, tiny: Tiny, caplog: pytest.LogCaptureFixture
    ) -> None:
        """random_split makes Subsets: labels and classes are those of the whole."""
        part = Subset(ImageFolder(str(folder / "train")), list(range(35, 3, -1)))
        with caplog.at_level(logging.INFO, "fastaug"):
            images = ImageSet.from_dataset(part)
        assert "once for its label" not in caplog.text
        assert images.classes == ("blue", "green", "red")
        assert images.labels.tolist() == [part[i][1] for i in range(len(part))]

    def test_a_transform_of_the_labels(self, folder: Path) -> None:
        """ImageFolder's list of targets does not have it; the first label is the same."""
        turned = ImageFolder(str(folder / "train"), target_transform=[0, 2, 1].__getitem__)
        assert ImageSet.from_dataset(turned).labels.tolist() == [0] * 12 + [2] * 12 + [1] * 12

    def test_a_list_of_other_labels_than_those_of_the_items(self, folder: Path) -> None:
        dataset = own(folder)
        dataset.targets = ["x"] * 36  # type: ignore[attr-defined]
        assert ImageSet.from_dataset(dataset).labels.tolist() == sorted([0, 1, 2] * 12)

    def test_tensors(self, folder: Path, tiny: Tiny) -> None:
        pixels = torch.from_numpy(np.stack(pixels_of(folder))).permute(0, 3, 1, 2)
        dataset = TensorDataset(pixels, torch.tensor([0] * 12 + [1] * 12 + [2] * 12))
        assert_same(fastaug.build_loader(tiny(), dataset), fastaug.build_loader(tiny()))

    @pytest.mark.parametrize("name", ["targets", "labels"])
    def test_a_list_of_labels_saves_reading(self, name: str, folder: Path) -> None:
        dataset = own(folder)
        setattr(dataset, name, torch.tensor([0] * 12 + [1] * 12 + [2] * 12))
        ImageSet.from_dataset(dataset)
        assert dataset.reads <= 2

    def test_without_it_every_item_is_read(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "fastaug"):
            images = ImageSet.from_dataset(own(folder))
        assert images.classes == ("0", "1", "2")
        assert "once for its label" in caplog.text


class TestPixels:
    @pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I;16"])
    def test_modes_of_pillow_are_decoded_as_files_are(self, mode: str, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        if mode == "I;16":
            image = Image.fromarray(rng.integers(0, 2**16, (5, 7), np.uint16))
        else:
            image = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).convert(mode)
        kind = "TIFF" if mode == "CMYK" else "PNG"
        image.save(tmp_path / "x", kind)
        of_file = ImageSet.from_files([tmp_path / "x"], [0]).image(0)
        assert np.array_equal(ImageSet.from_dataset(Own([(image, 0)])).image(0), of_file)

    def test_three_by_n_by_three(self) -> None:
        """Torch has the channels first, numpy last."""
        pixels = np.arange(3 * 5 * 3, dtype=np.uint8).reshape(3, 5, 3)
        items = Own([(torch.from_numpy(pixels), 0), (pixels, 0)])
        images = ImageSet.from_dataset(items)
        assert np.array_equal(images.image(0), pixels.transpose(1, 2, 0))
        assert np.array_equal(images.image(1), pixels)


class TestMistakes:
    @pytest.mark.parametrize(
        ("item", "names"),
        [
            ((torch.zeros(3, 8, 8), 0), ("Own[0]", "float32", "[3,", "Tensor")),
            ((np.zeros((8, 8), np.uint8), 0), ("Own[0]", "ndarray", "[8,")),
            (("photo.jpg", 0), ("Own[0]", "str")),
            ({"image": b"", "label": 0}, ("Own[0]", "dict")),
            ((b"", 0, 1), ("Own[0]", "tuple")),
            (b"image", ("Own[0]", "bytes")),
        ],
    )
    def test_a_wrong_kind_of_item(self, item: Any, names: tuple[str, ...], tiny: Tiny) -> None:
        with raises(DataError, *names):
            fastaug.build_loader(tiny(), Own([item] * 20))

    def test_a_wrong_kind_of_item_further_on(self, folder: Path, tiny: Tiny) -> None:
        dataset = own(folder)
        dataset.items[30] = (torch.zeros(3, 8, 8), 2)
        with raises(DataError, "Own[30]", "float32"):
            fastaug.build_loader(tiny(), dataset)

    @pytest.mark.parametrize(
        "label", [None, 1.5, True, "red", torch.tensor([0, 1]), torch.tensor(0.5), 2**70]
    )
    def test_a_wrong_kind_of_label(self, label: Any, folder: Path, tiny: Tiny) -> None:
        dataset = own(folder)
        dataset.items[7] = (dataset.items[7][0], label)
        with raises(DataError, "Own", str(2**70) if type(label) is int else "7"):
            fastaug.build_loader(tiny(), dataset)

    @pytest.mark.parametrize(
        ("labels", "classes", "names"),
        [
            ([0, 1, 3], ["a", "b", "c"], ("3", "2")),
            ([0, -1, 1], None, ("-1",)),
            (["a", "x", "b"], ["a", "b"], ("x",)),
            (["a", 1, "b"], None, ("int",)),
            ([0, 1, 2**62], None, ("4,611,686,018,427,387,905",)),
            ([0, 1], None, ("3", "2")),
            ([0, 1, 0], ["a", "a"], ("a",)),
            ([0, 1, 0], "ab", ("ab",)),
        ],
    )
    def test_wrong_labels(self, labels: Any, classes: Any, names: tuple[str, ...]) -> None:
        with raises(DataError, *names):
            ImageSet.from_files(["1.jpg", "2.jpg", "3.jpg"], labels, classes)

    def test_nothing(self, tiny: Tiny) -> None:
        for empty in ([], Own([])):
            with raises(DataError, "empty"):
                fastaug.build_loader(tiny(), empty)

    @pytest.mark.parametrize("images", [["a.jpg", "b.jpg"], [("a.jpg",)], [(b"encoded", 0)]])
    def test_a_list_of_something_else(self, images: Any, tiny: Tiny) -> None:
        with raises(DataError, "images[0]"):
            fastaug.build_loader(tiny(), images)

    def test_other_objects(self, folder: Path, tiny: Tiny) -> None:
        class Stream(IterableDataset):
            def __iter__(self) -> Iterator:
                return iter([])

        for images in (str(folder), {0: b""}, 7, Stream(), DataLoader(own(folder))):
            with raises(DataError, type(images).__name__):
                fastaug.build_loader(tiny(), images)  # type: ignore[arg-type]

    def test_files_that_are_missing(self, folder: Path, tiny: Tiny) -> None:
        with raises(DataError, "nowhere.jpg"):
            fastaug.build_loader(tiny(), [*files_of(folder), ("nowhere.jpg", "red")])


class TestFailures:
    @both_loaders
    def test_an_item_that_fails_is_a_bad_image(self, loader: str, folder: Path, tiny: Tiny) -> None:
        dataset = own(folder, failing={5: KeyError("lost"), 7: ValueError("two\nlines")})
        loader_ = fastaug.build_loader(tiny(loader=loader, max_bad=0.1), dataset)
        assert set(loader_.images.bad) == {5, 7}
        assert "KeyError" in loader_.images.bad[5]
        used = torch.cat([indices for _, _, indices in all_batches(loader_)]).tolist()
        assert not {5, 7} & set(used)

    @both_loaders
    def test_one_that_fails_later(self, loader: str, folder: Path, tiny: Tiny) -> None:
        dataset = own(folder)
        loader_ = fastaug.build_loader(tiny(loader=loader, max_bad=0.1), dataset)
        dataset.failing[5] = RuntimeError("a worker was lost")
        used = torch.cat([indices for _, _, indices in all_batches(loader_)]).tolist()
        assert 5 not in used
        assert set(loader_.images.bad) <= {5}

    def test_a_label_that_could_not_be_read_is_not_made_up(self, folder: Path) -> None:
        dataset = own(folder, failing={5: OSError(5, "Input/output error")})
        images = ImageSet.from_dataset(dataset)
        dataset.failing.clear()
        with raises(DataError, "5"):
            images.encoded(5)
        assert images.encoded(6) == dataset.items[6][0]

    def test_all_of_them(self, folder: Path, tiny: Tiny) -> None:
        dataset = own(folder, failing=dict.fromkeys(range(36), ValueError("closed file")))
        with raises(DataError, "Own[0]", "ValueError"):
            fastaug.build_loader(tiny(), dataset)

    def test_damaged_bytes(self, folder: Path, tiny: Tiny) -> None:
        dataset = own(folder)
        dataset.items[9] = (dataset.items[9][0][:200], 0)
        loader = fastaug.build_loader(tiny(max_bad=0.1), dataset)
        assert set(loader.images.bad) == {9}

    def test_a_scan_is_not_remembered(self, folder: Path, tiny: Tiny) -> None:
        """Another Dataset of the same kind and length has other images."""
        dataset = own(folder)
        broken = own(folder)
        broken.items[9] = (b"not an image", 0)
        assert set(fastaug.build_loader(tiny(max_bad=0.1), broken).images.bad) == {9}
        assert not fastaug.build_loader(tiny(), dataset).images.bad


class OneAtATime(Own):
    """Fails if two threads are in it, as a file of HDF5 does."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.most, self._inside = 0, 0
        self._count = threading.Lock()

    def __getitem__(self, index: int) -> Any:
        with self._count:
            self._inside += 1
            self.most = max(self.most, self._inside)
        time.sleep(0.002)
        with self._count:
            self._inside -= 1
        return self.items[index]


@pytest.mark.parametrize("thread_safe", [False, True])
def test_threads_take_turns(thread_safe: bool, folder: Path, tiny: Tiny) -> None:
    dataset = OneAtATime(own(folder).items)
    images = ImageSet.from_dataset(dataset, thread_safe=thread_safe)
    all_batches(fastaug.build_loader(tiny(loader="dali"), images))
    assert (dataset.most == 1) != thread_safe


def test_worker_processes(folder: Path, tiny: Tiny) -> None:
    """The lock is held by another thread while the workers are forked."""
    images = ImageSet.from_dataset(own(folder, as_pil))
    loader = fastaug.build_loader(tiny(workers=2), images)
    with images.storage._lock:  # type: ignore[union-attr]
        found = all_batches(loader)
    assert len(found) == len(loader)


def test_a_storage_can_be_sent_to_another_process(folder: Path) -> None:
    images = DatasetImages(own(folder))
    copy = pickle.loads(pickle.dumps(images))
    assert copy.read(3) == images.read(3)
    assert copy.stamps(np.arange(3)).tolist() == images.stamps(np.arange(3)).tolist()


def test_a_state_continues(folder: Path, tiny: Tiny) -> None:
    first = fastaug.build_loader(tiny(), own(folder))
    batches = iter(first)
    next(batches)
    second = fastaug.build_loader(tiny(), own(folder))
    second.load_state_dict(first.state_dict())
    expected, found = next(batches), next(iter(second))
    assert torch.equal(expected.views, found.views)
    assert torch.equal(expected.indices, found.indices)


def test_large_encoded_items_are_not_encoded_again(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, "JPEG", quality=100)
    images = ImageSet.from_dataset(Own([(file.getvalue(), 0)]))
    assert images.encoded(0) == file.getvalue()
