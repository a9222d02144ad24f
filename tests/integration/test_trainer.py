"""The trainer: what a run leaves behind, that it repeats itself, and that nothing is lost."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import missing, raises
from PIL import Image
from torch import nn
from training import assert_same_weights, metrics, run, tiny_config, weights

from fastaug.config import TrainConfig
from fastaug.engine import learner
from fastaug.engine.evaluation import Evaluation
from fastaug.engine.metrics import Meter
from fastaug.engine.trainer import Trainer
from fastaug.errors import CheckpointError, ConfigError, DataError
from fastaug.runs.checkpoint import evaluated_weights, load_checkpoint
from fastaug.runtime.device import check_compiler

Tiny = Callable[..., TrainConfig]
STEPS = 8  # of tiny(): 36 images, 8 in a step, 2 epochs


def test_what_a_run_leaves_behind(tiny: Tiny) -> None:
    folder = run(tiny())
    names = {path.name for path in folder.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents")}
    assert names - events == {
        *("config.json", "metrics.jsonl", "summary.json"),
        *("last.pt", "best.pt", "best.safetensors", "checkpoints", "views.png"),
    }
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        f"step-{step:09}.pt" for step in (4, 8)
    }
    assert len(events) == 1
    kinds = [(record["kind"], record["step"]) for record in metrics(folder)]
    assert kinds == [
        *(("train", step) for step in (2, 4)),
        ("eval", 4),
        *(("train", step) for step in (6, 8)),
        ("eval", 8),
        ("final", 8),
    ]
    first = metrics(folder)[0]
    assert first.keys() == {"kind", "step", "epoch", "loss", "nll", "kl", "lr", "skipped_steps"}
    assert first["loss"] == pytest.approx(first["nll"] + first["kl"], abs=1e-5)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"]
    assert summary["measures"].keys() == {
        *("top1", "top5", "nll", "invariance"),
        *("tta_top1", "tta_top5", "tta_logits_top1", "tta_logits_top5"),
        *("tta_top1_at_1", "tta_top1_at_2"),
    }


def test_it_learns(tiny: Tiny) -> None:
    folder = run(tiny(epochs=12))
    assert json.loads((folder / "summary.json").read_text())["measures"]["top1"] > 0.9


def test_two_runs_of_one_seed_are_the_same(tiny: Tiny) -> None:
    config = tiny(augment="randaugment", workers=1)
    first, second = run(config, "1"), run(config.replace(workers=0), "2")
    assert metrics(first) == metrics(second)
    assert_same_weights(first, second)
    other = run(config.replace(seed=1), "3")
    assert metrics(other) != metrics(first)


@pytest.fixture(scope="module", params=["torch", "dali"])
def in_parts(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainConfig, Path]:
    """A config whose steps have two parts, and its run without a stop."""
    out = tmp_path_factory.mktemp("in-parts") / "run"
    config = tiny_config(folder, out, accumulate=2, log_every=3, loader=request.param)
    return config, run(config, "-whole")


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_stopping_after_any_step_changes_nothing(
    in_parts: tuple[TrainConfig, Path], stop: int, tmp_path: Path
) -> None:
    config, whole = in_parts
    config = config.replace(out=str(tmp_path / "run"))
    stopped = run(config.replace(max_steps=stop))
    assert load_checkpoint(stopped / "last.pt")["step"] == stop
    resumed = run(config, checkpoint=stopped / "last.pt")
    assert_same_weights(resumed, whole)
    assert metrics(resumed) == metrics(whole)
    assert (
        load_checkpoint(resumed / "best.pt")["step"] == load_checkpoint(whole / "best.pt")["step"]
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_views_of_the_networks_dtype_do_not_change_the_weights(tiny: Tiny, precision: str) -> None:
    config = tiny(precision=precision, max_steps=3)
    assert_same_weights(run(config), run(config.replace(views_dtype="fp32"), "-fp32"))


@pytest.mark.parametrize(
    "changes",
    [
        {"ema": 0.9},
        {"precision": "bf16", "views_dtype": "bf16"},
        {"precision": "fp16", "views_dtype": "bf16", "loader": "dali"},
        {"augment": "randaugment", "workers": 1},
        {"augment": "randaugment", "loader": "dali"},
        {"loader": "dali", "precision": "bf16", "views_dtype": "fp16", "last_batch": "fill"},
        {"model": "timm/test_vit", "dropout": 0.2, "stochastic_depth": 0.2, "size": 32},
        {"model": "resnet18", "max_steps": 6},
        {"average": "logits", "label_smoothing": 0.1, "schedule": "halving", "nesterov": True},
        {"clip_norm": 0.1, "ema": 0.9, "nesterov": True},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_stopping_in_the_middle_of_an_epoch(tiny: Tiny, changes: dict) -> None:
    config = tiny(**changes)
    whole = run(config, "-whole")
    stopped = run(config.replace(max_steps=5))
    resumed = run(config, checkpoint=stopped / "last.pt")
    assert_same_weights(resumed, whole)
    assert metrics(resumed) == metrics(whole)
    ema = load_checkpoint(resumed / "last.pt")["ema"]
    assert (ema is not None) == (config.optim.ema > 0)
    if ema is not None:
        expected = load_checkpoint(whole / "last.pt")["ema"]
        assert all(torch.equal(ema[name], expected[name]) for name in expected)


def test_every_update_has_the_rate_of_the_schedule(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    step = torch.optim.SGD.step

    def spy(optimizer: torch.optim.SGD, *args: object, **kwargs: object) -> object:
        used.append([group["lr"] for group in optimizer.param_groups])
        return step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    folder = run(tiny(lr=0.08, accumulate=2))
    expected = [0.04 * (1 + math.cos(math.pi * update / STEPS)) for update in range(STEPS)]
    assert used == [[pytest.approx(rate)] * 2 for rate in expected]
    logged = [record["lr"] for record in metrics(folder) if record["kind"] == "train"]
    assert logged == pytest.approx(expected[1::2])


@pytest.mark.parametrize(("clip", "is_clipped"), [(0.01, True), (1e6, False), (0.0, False)])
def test_a_clipped_step_follows_the_gradient(tiny: Tiny, clip: float, is_clipped: bool) -> None:
    """Plain SGD moves the weights by -rate * gradient, whose norm is at most clip_norm."""
    trainer = Trainer(tiny(clip_norm=clip, momentum=0.0, weight_decay=0.0))
    learner = trainer.learner
    learner.start_step(0)
    learner.backward(next(iter(trainer.loader)))
    before = {n: p.detach().double().clone() for n, p in learner.model.named_parameters()}
    gradient = {n: p.grad.double().clone() for n, p in learner.model.named_parameters()}
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
    assert norm > 0.1
    learner.update(0.5)
    scale = clip / norm if is_clipped else 1.0
    for name, parameter in learner.model.named_parameters():
        expected = before[name] - 0.5 * scale * gradient[name]
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-4, atol=1e-7)


def test_parts_add_up_to_the_whole_step(tiny: Tiny) -> None:
    """In fp32 the same weights, but for the order of the sums."""
    once = run(tiny(lr=0.01), "1")
    parts = run(tiny(lr=0.01, accumulate=4), "4")
    for ours, theirs in zip(weights(once).values(), weights(parts).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_moving_average_is_what_is_evaluated(tiny: Tiny) -> None:
    folder = run(tiny(ema=0.5, epochs=1))
    state = load_checkpoint(folder / "last.pt")
    name = "head.weight"
    assert not torch.equal(state["ema"][f"module.{name}"], state["model"][name])
    assert torch.equal(evaluated_weights(state)[name], state["ema"][f"module.{name}"])


def test_metrics_are_read_only_every_few_steps(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    means = Meter.means
    monkeypatch.setattr(Meter, "means", lambda meter: reads.append(1) or means(meter))
    run(tiny(log_every=3))
    assert len(reads) == 4  # steps 3, 4 (end of the epoch), 6 and 8


def test_checkpoints_within_an_epoch(tiny: Tiny) -> None:
    folder = run(tiny(checkpoint_every=3, epochs=1))
    state = load_checkpoint(folder / "checkpoints/step-000000003.pt")
    assert (state["step"], state["loader"]["position"]) == (3, 3)


def test_evaluation_now_and_then(tiny: Tiny) -> None:
    folder = run(tiny(epochs=5, eval_every=2))
    evaluated = [r["epoch"] for r in metrics(folder) if r["kind"] == "eval"]
    assert evaluated == [2, 4, 5]


def test_a_stop_before_the_first_epoch_still_leaves_a_best(tiny: Tiny) -> None:
    folder = run(tiny(max_steps=1))
    assert (folder / "best.pt").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["finished"], summary["step"], summary["total_steps"]) == (False, 1, STEPS)


def test_best_of_a_run_that_stops_in_its_first_epoch_is_of_the_held_out_images(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(evaluation: Evaluation, *_args: object, **_kwargs: object) -> dict[str, float]:
        return {"top1": len(evaluation.image_sets[0]) / 100}

    monkeypatch.setattr(Evaluation, "measure", measure)
    summary = Trainer(tiny(validation=0.25, max_steps=2)).fit()
    assert summary["best_top1"] == 0.09  # 9 of the 36 training images; there are 15 test images


def test_the_banner_counts_the_steps_of_this_run(tiny: Tiny, capsys: pytest.CaptureFixture) -> None:
    run(tiny(max_steps=3))
    assert "3 of 8 steps of 8 images x 2 views" in capsys.readouterr().out


@pytest.mark.parametrize(("side", "hint"), [(48, True), (47, False)])
def test_a_hint_for_photos(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture, side: int, hint: bool
) -> None:
    """Views of 8 px."""
    rng = np.random.default_rng(0)
    for split, name in itertools.product(("train", "test"), ("a", "b")):
        (tmp_path / "data" / split / name).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 256, (side, 2 * side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / split / name / f"{number}.jpg")
    run(tiny(data=str(tmp_path / "data"), size=8, max_steps=1, tta=0))
    shown = capsys.readouterr().out
    assert ("--size 128" in shown) == hint
    assert ("96 x 48" in shown) == hint


@pytest.mark.parametrize("loader", ["torch", "dali"])
def test_a_run_goes_on_without_an_image_that_went_bad(
    tiny: Tiny, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, loader: str
) -> None:
    data = Path(shutil.copytree(folder, tmp_path / "data"))
    config = tiny(data=str(data), loader=loader, max_bad=0.05)
    going = Trainer(config)
    victim = Path(going.train_images.where(list(going.loader.batches())[2].indices[0]))
    victim.write_bytes(victim.read_bytes()[:300])
    going.fit()
    out = Path(config.run.out)
    assert json.loads((out / "summary.json").read_text())["finished"]
    (line,) = (out / "bad-images.txt").read_text().splitlines()
    assert line.startswith(f"{victim}: ")
    capsys.readouterr()
    # A run that has known of it from the start, and goes on from where it was met.
    again = run(config.replace(max_steps=6, out=f"{config.run.out}-again"))
    shown = capsys.readouterr().out
    assert missing(shown, "35 15 1") == []  # training, test and bad images
    (listed,) = (again / "bad-images.txt").read_text().splitlines()
    assert listed == line


class TestResume:
    def test_other_settings_are_refused(self, tiny: Tiny) -> None:
        stopped = run(tiny(max_steps=1))
        with raises(CheckpointError, "--lr 0.05 0.1"):
            Trainer(tiny(lr=0.1), stopped / "last.pt")

    def test_other_data_is_refused(self, tiny: Tiny, folder: Path, tmp_path: Path) -> None:
        stopped = run(tiny(max_steps=1))
        other = Path(shutil.copytree(folder, tmp_path / "other"))
        (other / "train/red/00.jpg").unlink()
        with raises(CheckpointError, "36 35"):
            Trainer(tiny(data=str(other)), stopped / "last.pt")

    def test_data_that_has_moved_is_the_same(
        self, tiny: Tiny, folder: Path, tmp_path: Path
    ) -> None:
        stopped = run(tiny(max_steps=1))
        moved = shutil.copytree(folder, tmp_path / "moved")
        Trainer(tiny(data=str(moved)), stopped / "last.pt")

    def test_a_finished_run_is_evaluated_again(self, tiny: Tiny) -> None:
        finished = run(tiny())
        before = metrics(finished)
        assert metrics(run(tiny(), checkpoint=finished / "last.pt")) == before


@pytest.mark.parametrize("loader", ["torch", "dali"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_error_of_the_data_loses_no_step(
    tiny: Tiny, folder: Path, tmp_path: Path, accumulate: int, loader: str
) -> None:
    config = tiny(accumulate=accumulate, loader=loader)
    whole = run(config, "-whole")
    data = Path(shutil.copytree(folder, tmp_path / "data"))
    config = config.replace(data=str(data))
    failing = Trainer(config)
    # The image that step 3 sees first: two steps are made before it.
    batches = list(failing.loader.batches())
    victim = Path(failing.train_images.where(batches[2 * accumulate].indices[-1]))
    content = victim.read_bytes()
    victim.write_bytes(content[:100])
    with raises(DataError, victim.name):
        failing.fit()
    assert load_checkpoint(Path(config.run.out) / "last.pt")["step"] == 2
    victim.write_bytes(content)
    assert_same_weights(run(config, checkpoint=Path(config.run.out) / "last.pt"), whole)


def test_an_error_in_the_middle_of_a_step_loses_no_step(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(accumulate=2, model="timm/test_vit", dropout=0.3, size=32)
    whole = run(config, "-whole")
    calls = []

    def fails_once(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 6:  # the second part of the third step
            raise RuntimeError("out of memory")
        return loss_terms(*args, **kwargs)

    loss_terms = learner.loss_terms
    monkeypatch.setattr(learner, "loss_terms", fails_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(config)
    folder = Path(config.run.out)
    assert load_checkpoint(folder / "last.pt")["step"] == 2
    assert_same_weights(run(config, checkpoint=folder / "last.pt"), whole)


def test_a_device_that_is_not_there(tiny: Tiny) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with raises(ConfigError, "--device CUDA GPU"):
        Trainer(tiny(device="cuda"))
    with raises(ConfigError, "gpu --device cpu"):
        Trainer(tiny(device="gpu"))


def test_compile_without_a_compiler(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with raises(ConfigError, "--compile CPU"):
        Trainer(tiny(compile="default", device="cpu"))


def test_what_compile_needs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, and the C compiler that Triton would choose: CC, and only that one, if it is set."""
    gpu = torch.device("cuda")
    compiler = tmp_path / "clang"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_compiler(gpu)
    monkeypatch.setenv("CC", "no-such-cc")
    with raises(ConfigError, "--compile GPU CC=no-such-cc"):
        check_compiler(gpu)
    monkeypatch.setenv("CC", str(compiler))
    check_compiler(gpu)
    monkeypatch.delenv("CC")
    compiler.unlink()
    with raises(ConfigError, "--compile GPU gcc clang CC"):
        check_compiler(gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "--compile GPU Triton"):
        check_compiler(gpu)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compile_passes_its_mode_on(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Modes with CUDA graphs must know where a step begins; Inductor itself is a stress test."""
    modes, begins = [], []

    def compiled(network: nn.Module, *, mode: str) -> nn.Module:
        modes.append(mode)
        return network

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begins.append(1))
    run(tiny(compile=mode, max_steps=3, tta=0))
    assert modes == [mode]
    assert len(begins) == (0 if mode == "default" else 3)


def test_cuda_graph_needs_a_gpu(tiny: Tiny) -> None:
    with raises(ConfigError, "--cuda-graph cpu"):
        Trainer(tiny(cuda_graph=True, device="cpu"))


def test_tf32_on_a_cpu_is_fp32_and_the_run_reports_it(
    tiny: Tiny, capsys: pytest.CaptureFixture
) -> None:
    config = tiny(device="cpu", max_steps=3, tta=0)
    tf32, fp32 = run(config.replace(precision="tf32"), "-tf32"), run(config, "-fp32")
    assert_same_weights(tf32, fp32)
    assert "cpu, fp32," in capsys.readouterr().out
    summary = json.loads((tf32 / "summary.json").read_text())
    assert summary["environment"]["precision"] == "fp32"


def test_deterministic_changes_nothing_on_a_cpu(tiny: Tiny) -> None:
    config = tiny(device="cpu", model="resnet18", max_steps=2, tta=0)
    plain = run(config, "-plain")
    try:
        again = run(config.replace(deterministic=True), "-deterministic")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_weights(again, plain)
