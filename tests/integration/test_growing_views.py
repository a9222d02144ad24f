"""Progressive resizing: loaders against loaders of one size, trainings against a loop by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises
from PIL import Image
from ranks import run_ranks, train
from torch import Tensor
from training import assert_same_weights, metrics, run, weights

import fastaug
from fastaug import cli, preview
from fastaug.config import TrainConfig
from fastaug.data.loader import ViewLoader
from fastaug.engine.dry_run import dry_run
from fastaug.engine.learner import Learner
from fastaug.engine.loaders import build_evaluation_loader
from fastaug.engine.optim import learning_rate
from fastaug.engine.trainer import Trainer
from fastaug.errors import CheckpointError
from fastaug.kernels.objective import ObjectiveTerms
from fastaug.runtime.distributed import Group
from fastaug.train import configure, main, read_settings
from fastaug.views.batch import ViewBatch

Tiny = Callable[..., TrainConfig]
SIZES = [16, 16, 24, 24, 32]
"""The sizes of 16:32 in 5 epochs, by hand."""
RANDAUGMENT = {"augment": "randaugment", "randaugment_magnitude": 9.0, "randaugment_layers": 2}
LOADERS: dict[str, dict] = {
    "torch": {"loader": "torch", **RANDAUGMENT},
    "torch with workers": {"loader": "torch", "workers": 2},
    "fused": {"loader": "dali", "views_engine": "fused", **RANDAUGMENT},
    "dali": {"loader": "dali", "views_engine": "dali", **RANDAUGMENT},
    "dali's policy": {"loader": "dali", **RANDAUGMENT, "randaugment_policy": "dali"},
}


def growing(tiny: Tiny, **changes: object) -> TrainConfig:
    return tiny(**({"initial_size": 16, "size": 32, "epochs": 5} | changes))


def of_one_size(config: TrainConfig, size: int) -> ViewLoader:
    return fastaug.build_loader(config.replace(initial_size=0, size=size))


def assert_same(ours: list[ViewBatch], theirs: list[ViewBatch]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.labels, other.labels)
        assert one.views.shape == other.views.shape
        assert one.views.stride() == other.views.stride()
        assert torch.equal(one.views, other.views)


class TestLoaders:
    @pytest.fixture(params=LOADERS)
    def config(self, request: pytest.FixtureRequest, tiny: Tiny) -> TrainConfig:
        return growing(tiny, **LOADERS[request.param])

    def test_every_epoch_has_the_views_of_a_loader_of_its_size(self, config: TrainConfig) -> None:
        """All batches are kept until the end: later epochs are prefetched, and memory is reused."""
        loader = fastaug.build_loader(config)
        epochs = []
        for size in SIZES:
            assert loader.view_size == size
            epochs.append(list(loader))
        for epoch, size in enumerate(SIZES):
            other = of_one_size(config, size)
            other.set_epoch(epoch)
            assert_same(epochs[epoch], list(other))
            assert epochs[epoch][0].views.shape == (8, 2, 3, size, size)

    def test_a_state_continues_in_the_middle_of_any_epoch(self, config: TrainConfig) -> None:
        loader, resumed = fastaug.build_loader(config), fastaug.build_loader(config)
        for _ in SIZES:
            first = list(islice(loader, 2))
            assert len(first) == 2
            resumed.load_state_dict(loader.state_dict())
            assert_same(list(resumed), list(loader))

    def test_views_made_again_have_the_size_of_their_epoch(self, config: TrainConfig) -> None:
        indices = np.arange(11)
        loader = fastaug.build_loader(config)
        for epoch in (4, 0, 2):
            expected = of_one_size(config, SIZES[epoch]).make_views(epoch, indices)
            assert torch.equal(loader.make_views(epoch, indices), expected)

    def test_an_evaluation_has_views_of_the_last_size(self, config: TrainConfig) -> None:
        loader = fastaug.build_loader(config)
        for views in (0, 2):
            ours = build_evaluation_loader(config, loader.images, views=views)
            same = config.replace(initial_size=0)
            assert_same(list(ours), list(build_evaluation_loader(same, loader.images, views=views)))


@pytest.mark.parametrize("engine", ["fused", "dali"])
def test_images_in_memory(tmp_path: Path, tiny: Tiny, engine: str) -> None:
    """With the fused engine several small batches are one chunk, fewer of larger views."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (400, 20, 20, 3), np.uint8)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(400) % 2)
    config = growing(
        tiny, data=str(tmp_path / "set.npz"), loader="dali", views_engine=engine, batch_size=20
    )
    loader = fastaug.build_loader(config)
    epochs = [list(loader) for _ in SIZES]
    for epoch, size in enumerate(SIZES):
        other = of_one_size(config, size)
        other.set_epoch(epoch)
        assert_same(epochs[epoch], list(other))


class TestLoaderState:
    def test_of_earlier_versions_has_no_first_size(self, tiny: Tiny) -> None:
        loader = fastaug.build_loader(tiny())
        state = loader.state_dict() | {"position": 2}
        for name in ("--initial-size", "epochs of growing views"):
            del state[name]
        loader.load_state_dict(state)
        assert loader.position == 2
        with raises(CheckpointError, "--initial-size 0 8"):
            fastaug.build_loader(tiny(initial_size=8)).load_state_dict(state)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"initial_size": 0}, "--initial-size 16 0"),
            ({"initial_size": 24}, "--initial-size 16 24"),
            ({"epochs": 10}, "epochs 4 8"),
        ],
    )
    def test_of_other_sizes_is_refused(self, tiny: Tiny, changes: dict, named: str) -> None:
        state = fastaug.build_loader(growing(tiny)).state_dict()
        with raises(CheckpointError, named):
            fastaug.build_loader(growing(tiny, **changes)).load_state_dict(state)


# --- training ---


def by_hand(config: TrainConfig) -> dict[str, Tensor]:
    """The weights of a loop over loaders of one size each, in the order of the epochs."""
    torch.manual_seed(config.run.seed)
    plain = config.replace(initial_size=0)
    learner = Learner(plain, 3, torch.device("cpu"))
    learner.model.train()
    parts, step = config.optim.accumulate, 0
    for epoch, size in enumerate(SIZES):
        loader = of_one_size(config, size)
        loader.set_epoch(epoch)
        batches = list(loader)
        for start in range(0, len(batches), parts):
            learner.start_step(step)
            for place, batch in enumerate(batches[start : start + parts]):
                learner.backward(batch, 1 / parts, last=place == parts - 1)
            steps_per_epoch = len(batches) // parts
            rate = learning_rate(step, steps_per_epoch, config.optim, config.images_per_step)
            learner.update(rate)
            step += 1
    return learner.model.state_dict()


@pytest.mark.parametrize(
    "changes",
    [{}, {"loader": "dali", "accumulate": 2, "model": "timm/resnet10t"}],
    ids=["torch", "dali, parts"],
)
def test_a_training_is_that_of_a_loop_by_hand(tiny: Tiny, changes: dict) -> None:
    config = growing(tiny, tta=0, eval_views=0, **changes)
    trained, expected = weights(run(config)), by_hand(config)
    assert trained.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(trained[name], values), name


@pytest.mark.parametrize("loader", ["torch", "dali"])
def test_a_run_that_stops_in_growing_epochs(tiny: Tiny, loader: str) -> None:
    config = growing(tiny, loader=loader, tta=0, eval_views=0)
    whole, parts = run(config, "-whole"), Path(f"{config.run.out}-parts")
    checkpoint = None
    for until in (2, 7, 9, 14, 0):  # 4 steps in an epoch
        run(config.replace(max_steps=until), "-parts", checkpoint)
        checkpoint = parts / "last.pt"
    assert_same_weights(parts, whole)
    assert metrics(parts) == metrics(whole)


def test_what_a_run_reports(tiny: Tiny, capsys: pytest.CaptureFixture) -> None:
    config = growing(tiny, tta=0, eval_views=0)
    folder = run(config)
    sizes = [(record["step"], record["size"]) for record in metrics(folder, "train")]
    assert sizes == [(step, SIZES[(step - 1) // 4]) for step in range(2, 21, 2)]
    shown = capsys.readouterr().out
    assert "16 to 32 px" in shown
    lines = [line for line in shown.splitlines() if "views of" in line]
    assert lines == [f"epoch {n}: views of {size} px" for n, size in ((1, 16), (3, 24), (5, 32))]
    assert json.loads((folder / "config.json").read_text())["initial_size"] == 16
    # A label and a row of the original and two views of 16 px, each drawn 8 times as large.
    with Image.open(folder / "views.png") as picture:
        assert picture.width == 3 * (128 + 4) + 4
    assert all("size" not in record for record in metrics(run(tiny(), "-constant")))


def test_ranks(tiny: Tiny) -> None:
    config = growing(tiny, kernel="reference", tta=0, eval_views=0, loader="dali")
    one = run(config, "-one")
    many = config.replace(out=f"{config.run.out}-many")
    assert run_ranks(2, train, many) == [0, 0]
    torch.testing.assert_close(weights(Path(many.run.out)), weights(one), rtol=1e-4, atol=2e-5)


def test_another_size_on_resume_is_refused(tiny: Tiny) -> None:
    out = str(run(growing(tiny, max_steps=1, tta=0)))
    config, checkpoint = configure(["--resume", out])
    assert (config.view.initial_size, config.view.size) == (16, 32)
    config, checkpoint = configure(["--resume", out, "--size", "16:32", "--max-steps", "2"])
    assert Trainer(config, checkpoint).step == 1
    for size, named in (
        ("32", "--initial-size 16 0"),
        ("24:32", "--initial-size 16 24"),
        ("16:40", "--size 32 40"),
    ):
        with raises(CheckpointError, named):
            Trainer(*configure(["--resume", out, "--size", size]))


@pytest.mark.parametrize("epochs", ["4", "6"])
def test_other_epochs_on_resume_are_refused(tiny: Tiny, epochs: str) -> None:
    """Also with a learning rate that does not depend on them."""
    out = str(run(growing(tiny, schedule="constant", max_steps=1, tta=0)))
    with raises(CheckpointError, f"--epochs {epochs} 5 --size 16:32"):
        Trainer(*configure(["--resume", out, "--epochs", epochs]))


def test_a_dry_run_takes_its_steps_at_the_last_size(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shapes = []
    backward = Learner.backward

    def recording(self: Learner, batch: ViewBatch, *args: float, **named: bool) -> ObjectiveTerms:
        shapes.append(batch.views.shape)
        return backward(self, batch, *args, **named)

    monkeypatch.setattr(Learner, "backward", recording)
    dry_run(growing(tiny), None, Group())
    assert shapes == [(8, 2, 3, 32, 32)] * 2
    assert "32 px" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("size: 16:32", (16, 32)),  # YAML's own reading is 992
        ("size: '16:32'", (16, 32)),
        ("view: {size: 128:224}", (128, 224)),
        ("size: 48", (0, 48)),
        ("initial_size: 16\nsize: 32", (16, 32)),
    ],
)
def test_sizes_in_a_config_file(tmp_path: Path, line: str, sizes: tuple[int, int]) -> None:
    (tmp_path / "own.yaml").write_text(line)
    config, _ = read_settings(["--config", str(tmp_path / "own.yaml")])
    assert (config.view.initial_size, config.view.size) == sizes
    config, _ = read_settings(["--config", str(tmp_path / "own.yaml"), "--size", "40"])
    assert (config.view.initial_size, config.view.size) == (0, 40)


def test_a_network_built_for_one_size_is_refused_before_the_data_is_read(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = ["--model", "timm/mixer_s32_224", "--size", "128:224", "--views", "1"]
    assert cli.run(main, ["--data", "nowhere", *flags, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "mixer_s32_224" in line
    assert "128" in line
    assert not out.exists()


def test_a_vision_transformer_takes_growing_views(tiny: Tiny) -> None:
    """At the last size it computes what the network of that size computes."""
    config = growing(tiny, model="timm/test_vit", initial_size=32, size=64, tta=0, eval_views=0)
    folder = run(config.replace(max_steps=1))
    plain = fastaug.build_model("timm/test_vit", 3, image_size=64)
    plain.load_state_dict(weights(folder))
    dynamic = fastaug.build_model("timm/test_vit", 3, image_size=64, several_sizes=True)
    dynamic.load_state_dict(weights(folder))
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(dynamic.eval()(images), plain.eval()(images))


def test_each_size_is_compiled_by_itself(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for one size, as many as there are sizes, whatever torch's own limit is."""
    compiled: list[list] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        shapes = [tuple(value.shape) for value in inputs if isinstance(value, Tensor)]
        compiled.append([shape for shape in shapes if len(shape) == 4 and shape[2] > 3])
        return graph.forward

    def compile_with(network: torch.nn.Module, mode: str, **options: bool) -> Callable:
        return own_compile(network, backend=backend, **options)

    own_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_with)
    monkeypatch.setattr("fastaug.engine.preflight.check_compiler", lambda device: None)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    torch.compiler.reset()
    config = growing(tiny, tta=0, eval_views=0)
    folder = run(config.replace(compile="default"), "-compiled")
    assert compiled == [[(16, 3, size, size)] for size in (16, 24, 32)]
    torch.testing.assert_close(weights(folder), weights(run(config, "-plain")))


def test_preview_draws_the_first_epoch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--data", str(folder), "--views", "2", "--logdir", "", "--size"]
    drawn = []
    for size in ("64:128", "64", "128"):
        assert preview.main([*flags, size]) == 0
        drawn.append(Path("preview.png").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]
