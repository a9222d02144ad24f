"""What ranks compare when they start: every difference is one error on all ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from ranks import run_ranks
from training import run

import fastaug
from fastaug.config import TrainConfig
from fastaug.engine import rank_check
from fastaug.engine.evaluation import evaluate_checkpoint
from fastaug.engine.loaders import scanned_sets
from fastaug.engine.rank_check import check_engines, check_same, describe_difference
from fastaug.engine.rank_data import agree_on_images
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError, DataError, FastaugError
from fastaug.kernels.native import NativeKernel
from fastaug.kernels.reference import ReferenceKernel
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runtime.distributed import Group

Tiny = Callable[..., TrainConfig]
CPU = torch.device("cpu")


def outcome(work: Callable[[], Any]) -> tuple[str, str, bool, Any]:
    """Class, message and `reported` of the error that work raises, and its result."""
    try:
        return "", "", False, work()
    except FastaugError as error:
        return type(error).__name__, str(error), error.reported, None


def assert_refused(found: list[tuple], *words: str, kind: type = ConfigError) -> None:
    """All ranks have an error of this kind; only rank 0 prints its own, which has these words."""
    names, messages, reported, _ = zip(*found, strict=True)
    assert set(names) == {kind.__name__}, messages
    assert "\n" not in messages[0]
    assert [word for word in words if word not in messages[0]] == []
    assert reported == (False, *[True] * (len(found) - 1))


# --- data ---


def swap_classes(data: Path) -> None:
    for old, new in (("blue", "x"), ("red", "blue"), ("x", "red")):
        (data / "train" / old).rename(data / "train" / new)


def remove_images(data: Path) -> None:
    for number in range(4):
        (data / f"train/green/{number:02}.jpg").unlink()


def rename_image(data: Path) -> None:
    (data / "train/green/03.jpg").rename(data / "train/green/3.jpg")


def change_pixels(data: Path) -> None:
    """Another picture under the same name, of the same size in pixels."""
    noise = np.random.default_rng(5).integers(0, 255, (20, 20, 3), np.uint8)
    Image.fromarray(noise).save(data / "train/green/03.jpg")


def change_size(data: Path) -> None:
    Image.new("RGB", (21, 20)).save(data / "train/green/03.jpg")


def change_test_image(data: Path) -> None:
    shutil.copy(data / "test/red/01.jpg", data / "test/red/02.jpg")


CHANGES: dict[Callable[[Path], None], tuple[str, ...]] = {
    swap_classes: ("training images", "rank 1"),
    remove_images: ("training images", "rank 1 has 32 images", "rank 0 has 36 images"),
    rename_image: ("training images", "rank 1"),
    change_pixels: ("training images", "green/03.jpg", "rank 1"),
    change_size: ("training images", "rank 1"),
    change_test_image: ("test images", "red/02.jpg", "rank 1"),
}


def _agree_on_each(group: Group, folders: list[list[Path]]) -> list[tuple]:
    """The outcome for each list of one folder per rank."""
    found = []
    for own in folders:
        config = TrainConfig.from_flat(data=str(own[group.rank]), workers=0).data

        def agree(config: Any = config) -> int:
            return len(agree_on_images(group, config, scanned_sets(config))["training"])

        found.append(outcome(agree))
    return found


def test_ranks_with_other_images_do_not_start(folder: Path, tmp_path: Path) -> None:
    changed = [tmp_path / change.__name__ for change in CHANGES]
    for change, copy in zip(CHANGES, changed, strict=True):
        shutil.copytree(folder, copy)
        change(copy)
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied, copy_function=shutil.copyfile)  # other modification times
    by_rank = run_ranks(2, _agree_on_each, [[folder, copy] for copy in (*changed, copied)])
    *refused, same = zip(*by_rank, strict=True)
    for words, found in zip(CHANGES.values(), refused, strict=True):
        assert_refused(found, *words, "--data")
    assert same == (("", "", False, 36),) * 2


def test_the_odd_one_of_three_ranks_is_named(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    remove_images(other)
    found = run_ranks(3, _agree_on_each, [[other, folder, folder]])
    assert_refused([own for (own,) in found], "rank 0 has 32 images", "ranks 1, 2 have 36 images")


def _bad_images(group: Group, folders: list[Path], max_bad: float) -> tuple:
    settings = {"data": str(folders[group.rank]), "workers": 0, "max_bad": max_bad}
    config = TrainConfig.from_flat(**settings).data
    if group.rank == 1:  # its own scan allows all that it finds
        sets = scanned_sets(TrainConfig.from_flat(**settings | {"max_bad": 1.0}).data)
    else:
        sets = scanned_sets(config)
    return outcome(lambda: sorted(agree_on_images(group, config, sets)["training"].bad))


def test_an_image_that_one_rank_cannot_use_is_used_by_none(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    os.truncate(other / "train/green/03.jpg", 100)
    green_03 = 12 + 3  # after the twelve blue ones
    found = run_ranks(2, _bad_images, [folder, other], 0.1)
    assert found == [("", "", False, [green_03])] * 2
    found = run_ranks(2, _bad_images, [folder, other], 0.0)
    assert_refused(found, "1 of 36 images", "--max-bad", kind=DataError)


# --- code, settings, engines ---


def _with_other_code(group: Group, package: Path) -> list[tuple]:
    def join(args: list[str]) -> None:
        with rank_check.join_ranks(args):
            pass

    # The group exists already.
    class Joined:
        def __enter__(self) -> Group:
            return group

        def __exit__(self, *_: object) -> None: ...

    rank_check.join_process_group = Joined
    is_second = group.rank == 1
    same = outcome(lambda: join(["--lr", "0.1", "--dali"]))
    flags = outcome(lambda: join(["--lr", "0.2" if is_second else "0.1", "--dali"]))
    switch = outcome(lambda: join(["--lr=0.1", *(["--dali"] if is_second else [])]))
    if is_second:
        fastaug.__file__ = str(package / "__init__.py")
    sources = outcome(lambda: join([]))
    if is_second:
        rank_check.metadata = SimpleNamespace(
            version=lambda name: "0.0.1", PackageNotFoundError=KeyError
        )
    return [same, flags, switch, sources, outcome(lambda: join([]))]


def test_ranks_with_other_code_or_flags_do_not_start(tmp_path: Path) -> None:
    package = tmp_path / "fastaug"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(fastaug.__file__).parent, package, ignore=ignored)
    with (package / "engine/optim.py").open("a") as file:
        file.write("# a comment\n")
    found = run_ranks(2, _with_other_code, package)
    same, flags, switch, sources, versions = zip(*found, strict=True)
    assert same == (("", "", False, None),) * 2
    assert_refused(flags, "--lr", "rank 1 has 0.2", "rank 0 has 0.1")
    assert_refused(switch, "--dali", "rank 0 has none")
    assert_refused(sources, "fastaug/engine/optim.py", "rank 1")
    assert "more differences" not in sources[0][1]
    assert_refused(versions, "torchvision", "rank 1 has 0.0.1")


class _OwnKernel(ReferenceKernel):
    pass


def _with_other_settings(group: Group, config: TrainConfig) -> list[tuple]:
    is_second = group.rank == 1
    lr = outcome(lambda: Trainer(config.replace(lr=0.3 if is_second else 0.2), None, group))
    chosen = (ReferenceKernel() if is_second else NativeKernel(), _OwnKernel())
    return [
        lr,
        *(outcome(lambda k=k: check_engines(group, config, k, "reference", CPU)) for k in chosen),
        outcome(lambda: check_engines(group, config, chosen[1], f"engine {group.rank}", CPU)),
    ]


def test_ranks_with_other_settings_or_engines_do_not_start(tiny: Tiny) -> None:
    found = run_ranks(2, _with_other_settings, tiny())
    lr, kernels, same, engines = zip(*found, strict=True)
    assert_refused(lr, "--lr", "rank 1 has 0.3", "rank 0 has 0.2")
    assert_refused(kernels, "kernel", "rank 1 has reference", "rank 0 has native", "--kernel")
    assert same == (("", "", False, None),) * 2
    assert_refused(engines, "rank 1 has engine 1", "--views-engine")


def _with_machine_settings(group: Group, config: TrainConfig) -> int:
    config = config.replace(workers=group.rank, progress_every=group.rank, max_steps=1, tta=0)
    Trainer(config, None, group).fit()
    return 0


def test_ranks_may_differ_in_what_depends_on_the_machine(tiny: Tiny) -> None:
    assert run_ranks(2, _with_machine_settings, tiny()) == [0, 0]


def _evaluate(group: Group, checkpoint: Path, folders: list[Path]) -> list[tuple]:
    """As fastaug.evaluate: with equal weights and data, other weights, other test images."""
    found = []
    for is_other_weight, data in ((False, folders[0]), (True, folders[0]), (False, folders[-1])):
        state = load_checkpoint(checkpoint)
        if group.rank == 1 and is_other_weight:
            next(iter(state["model"].values()))[0, 0, 0, 0] += 1
        own = data if group.rank == 1 else folders[0]
        config = TrainConfig.from_saved(state["config"]).replace(data=str(own))

        def evaluate(state: dict = state, config: TrainConfig = config) -> int:
            return len(evaluate_checkpoint(state, config, group, name="x.pt", batch_size=8)[0])

        found.append(outcome(evaluate))
    return found


def test_ranks_evaluate_the_same_checkpoint_on_the_same_images(
    tiny: Tiny, folder: Path, tmp_path: Path
) -> None:
    checkpoint = run(tiny(max_steps=1, tta=0, eval_views=0)) / "last.pt"
    other = shutil.copytree(folder, tmp_path / "other")
    change_test_image(other)
    found = run_ranks(2, _evaluate, checkpoint, [folder, other])
    same, weights, images = zip(*found, strict=True)
    assert same == (("", "", False, 15),) * 2
    assert_refused(weights, "x.pt", "rank 1")
    assert_refused(images, "test images", "red/02.jpg", "rank 1")


# --- errors of one rank ---


def _mistakes(group: Group) -> list[tuple]:
    def fail() -> None:
        if group.rank == 1:
            raise DataError("only here")

    def on_gpu() -> None:
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="GPU-1")
        group.on(torch.device("cuda:0" if group.rank == 0 else "cpu"))

    return [outcome(lambda: group.in_turn(fail)), outcome(on_gpu)]


def test_an_error_of_one_rank_ends_all() -> None:
    first, second = run_ranks(2, _mistakes)
    assert (first[0][:3], second[0][:3]) == (
        ("DataError", "only here", True),
        ("DataError", "only here", False),  # it prints it
    )
    assert_refused([first[1], second[1]], "--device", "rank 1")


def test_one_process_compares_nothing(tiny: Tiny) -> None:
    check_same(Group(), {"a": "b"}, "")
    sets = {"training": object()}
    assert agree_on_images(Group(), tiny().data, sets) == sets  # type: ignore[arg-type]


def test_the_value_of_most_ranks_is_the_usual_one() -> None:
    assert describe_difference(["b", "a", "a"]) == "rank 0 has b, ranks 1, 2 have a"
    assert describe_difference(["b", "a"]) == "rank 1 has a, rank 0 has b"
