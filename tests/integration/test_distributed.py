"""Ranks: the same global batch on 1, 2 and 4 of them is the same training."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises
from ranks import run_ranks, start_ranks, train, train_until_signalled
from torch import Tensor, nn

from fastaug.config import TrainConfig
from fastaug.engine.learner import Learner
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError, DataError
from fastaug.models.sync_norm import synchronize_batch_norm
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runtime.distributed import Agreement, Group, lost_rank
from fastaug.views.batch import ViewBatch

Tiny = Callable[..., TrainConfig]


def run(config: TrainConfig, ranks: int, name: str, checkpoint: Path | None = None) -> Path:
    """A run on so many ranks; a single one is this process."""
    config = config.replace(out=f"{config.run.out}-{name}")
    if ranks == 1:
        train(Group(), config, checkpoint)
    else:
        assert run_ranks(ranks, train, config, checkpoint) == [0] * ranks
    return Path(config.run.out)


def state(folder: Path, part: str = "model") -> dict[str, Tensor]:
    return load_checkpoint(folder / "last.pt")[part]


def curve(folder: Path) -> Tensor:
    """The numbers of all records, one after another."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [v for r in records for n, v in r.items() if n not in ("kind", "timing")]
    return torch.tensor(numbers, dtype=torch.float64)


def assert_same_training(ours: Path, theirs: Path, atol: float = 2e-5) -> None:
    torch.testing.assert_close(state(ours), state(theirs), rtol=1e-4, atol=atol)
    torch.testing.assert_close(curve(ours), curve(theirs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"loader": "dali", "log_every": 1}),
        (4, {"accumulate": 2, "last_batch": "fill", "ema": 0.9}),
    ],
    ids=["dali", "four"],
)
def test_the_same_batches_on_more_ranks_are_the_same_training(
    tiny: Tiny, ranks: int, changes: dict
) -> None:
    config = tiny(kernel="reference", **changes)
    one, many = run(config, 1, "one"), run(config, ranks, "many")
    assert_same_training(many, one)
    assert load_checkpoint(many / "last.pt")["loader"] == load_checkpoint(one / "last.pt")["loader"]


def _warnings_of_a_step(group: Group, config: TrainConfig) -> list[str]:
    learner = Learner(config, 3, torch.device("cpu"), group)
    views = torch.randn(2, 2, 32, 32, 3).permute(0, 1, 4, 2, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.backward(ViewBatch(views, torch.zeros(2, dtype=torch.int64), torch.arange(2)))
    return [str(warning.message) for warning in caught]


def test_gradients_of_standardized_convolutions_fit_into_ddp_s_buckets(tiny: Tiny) -> None:
    config = tiny(kernel="reference", model="nf_resnet26", size=32)
    assert run_ranks(2, _warnings_of_a_step, config) == [[], []]


def test_what_one_rank_leaves_others_finish(tiny: Tiny) -> None:
    config = tiny(kernel="reference", epochs=3)
    whole = run(config, 1, "whole")
    first = run(config.replace(max_steps=3), 2, "changing")
    for ranks, until in ((4, 7), (1, 0)):
        config = config.replace(max_steps=until, out=first.as_posix())
        if ranks == 1:
            train(Group(), config, first / "last.pt")
        else:
            assert run_ranks(ranks, train, config, first / "last.pt") == [0] * ranks
    assert_same_training(first, whole)


def _norms() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3)]
    return nn.Sequential(*layers, nn.BatchNorm2d(4)).double()


def _through_norms(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The gradients of a loss that is a mean over the images, and the running statistics."""
    for part in images:
        (model(part) ** 3).sum((1, 2, 3)).mean().backward()
    return [*(p.grad for p in model.parameters()), *model.buffers()]


def _synchronized(group: Group, images: np.ndarray) -> list[np.ndarray]:
    model = _norms()
    synchronize_batch_norm(model, "a model", group)
    own = torch.from_numpy(images)[:, group.rank :: group.ranks]
    return [group.mean_(tensor.double()).numpy() for tensor in _through_norms(model, own)]


def test_synchronized_batch_norm_is_that_of_the_whole_batch() -> None:
    images = 100 + torch.randn(2, 6, 3, 8, 8, generator=torch.Generator().manual_seed(4)).double()
    expected = _through_norms(_norms(), images)
    for ranks in run_ranks(2, _synchronized, images.numpy()):
        for found, wanted in zip(ranks, expected, strict=True):
            np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-9, atol=1e-9)


def test_a_training_with_synchronized_batch_norm(tiny: Tiny) -> None:
    """Looser than without: batch norm makes more of the last digits."""
    changes = {"batch_norm": "sync", "max_steps": 2, "lr": 0.003, "kernel": "reference"}
    config = tiny(model="resnet18", **changes)
    assert_same_training(run(config, 2, "two"), run(config, 1, "one"), atol=5e-4)


def test_local_batch_norm_is_that_of_parts(tiny: Tiny) -> None:
    """Two ranks compute what one does in two parts; the running means are those of both."""
    config = tiny(model="resnet18", max_steps=1, kernel="reference", tta=0, lr=0.01)
    ranks = state(run(config, 2, "ranks"))
    parts = state(run(config.replace(accumulate=2), 1, "parts"))
    whole = state(run(config, 1, "whole"))
    weights = [name for name in ranks if "running" not in name and "tracked" not in name]
    for name in weights:
        torch.testing.assert_close(ranks[name], parts[name], rtol=1e-4, atol=2e-5)
    assert any(not torch.allclose(ranks[n], whole[n], rtol=1e-4, atol=2e-5) for n in weights)
    # Of the first layer, whose input knows no norm: the mean over both parts is that of the batch.
    stem = "stem_norm.running_mean"
    torch.testing.assert_close(ranks[stem], whole[stem], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", ["wrn-10-1", "timm/test_efficientnet"])
def test_batch_norm_that_cannot_be_synchronized(tiny: Tiny, model: str) -> None:
    config = tiny(model=model, batch_norm="sync", size=32)
    with raises(ConfigError, f"--batch-norm sync {model} local"):
        Learner(config, 3, torch.device("cpu"))


def _count_sums(group: Group, config: TrainConfig) -> tuple[int, int]:
    trainer = Trainer(config, None, group)
    sums = []

    def hook(_state, bucket):
        sums.append(bucket.index())
        work = torch.distributed.all_reduce(
            bucket.buffer().div_(group.ranks), async_op=True
        ).get_future()
        return work.then(lambda done: done.value()[0])

    assert trainer.learner._ranks is not None
    trainer.learner._ranks.register_comm_hook(None, hook)
    trainer.fit()
    return len(sums), trainer.step


def test_parts_of_a_step_are_summed_over_ranks_once(tiny: Tiny) -> None:
    assert run_ranks(2, _count_sums, tiny(accumulate=2, epochs=1, tta=0)) == [(4, 4)] * 2


def _in_own_folder(group: Group, config: TrainConfig) -> int:
    os.dup2(os.open(f"said-by-{group.rank}", os.O_WRONLY | os.O_CREAT), 1)
    os.makedirs(f"rank{group.rank}")
    os.chdir(f"rank{group.rank}")
    return train(group, config)


def _count_states(group: Group, config: TrainConfig) -> int:
    states, state_dict = [], Trainer.state_dict
    Trainer.state_dict = lambda trainer: states.append(trainer.step) or state_dict(trainer)
    train(group, config)
    return len(states)


def test_checkpoints_by_the_clock_cost_the_other_ranks_nothing(tiny: Tiny) -> None:
    config = tiny(checkpoint_minutes=1e-9, epochs=1, tta=0)  # due after every one of four steps
    first, second = run_ranks(2, _count_states, config)
    by_the_clock, epoch_and_end = 2, 3  # the ranks know of it one step later
    assert (first, second) == (by_the_clock + epoch_and_end, 0)


def test_only_the_first_rank_writes_and_speaks(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ranks(2, _in_own_folder, tiny(epochs=1, out="run")) == [0, 0]
    assert (tmp_path / "rank0/run/last.pt").exists()
    assert list((tmp_path / "rank1").rglob("*")) == []
    assert (tmp_path / "said-by-0").read_text().count("epoch 1/1") == 1
    assert (tmp_path / "said-by-1").read_text() == ""


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(tiny: Tiny, ranks: int) -> None:
    """And the resumed run has the same bits: with 4 ranks, sums depend on their order."""
    config = tiny(epochs=4, kernel="reference")
    assert run_ranks(ranks, train_until_signalled, config, signal.SIGTERM) == [143] * ranks
    folder = Path(config.run.out)
    stopped = load_checkpoint(folder / "last.pt")["step"]
    assert 3 <= stopped <= 5
    assert run_ranks(ranks, train, config, folder / "last.pt") == [0] * ranks
    whole = run(config, ranks, "whole")
    for name, weight in state(folder).items():
        assert torch.equal(weight, state(whole)[name]), name
    assert torch.equal(curve(folder), curve(whole))


def _mistaken(group: Group, config: TrainConfig) -> tuple[str, bool]:
    try:
        Trainer(config, None, group)
    except DataError as error:
        return str(error), error.reported
    return "", False


def test_a_mistake_is_said_once(tiny: Tiny, tmp_path: Path) -> None:
    first, second = run_ranks(2, _mistaken, tiny(data=str(tmp_path / "nothing")))
    assert "no such file or folder" in first[0]
    assert first[0] == second[0]
    assert (first[1], second[1]) == (False, True)


def test_a_batch_that_the_ranks_cannot_share(tiny: Tiny) -> None:
    with raises(ConfigError, "--views 2 ranks 3 16"):
        tiny().images_per_part(3)


def _agree(group: Group) -> list[list[int]]:
    agreement = Agreement(group)
    own = [(5 * ((group.rank, turn) == (1, 1)), group.rank + turn) for turn in range(4)]
    return [agreement.largest(*numbers) for numbers in own]


def test_an_agreement_is_the_same_everywhere() -> None:
    assert run_ranks(2, _agree) == [[[0, 0], [0, 1], [5, 2], [0, 3]]] * 2
    alone = Agreement(Group())
    assert [alone.largest(n, 1) for n in (0, 5)] == [[0, 1], [5, 1]]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.distributed.DistBackendError("NCCL was aborted\nat x.cpp:1"),
            "aborted)",
        ),
        (torch.distributed.DistNetworkError(), "(DistNetworkError)"),
        (RuntimeError("[gloo/pair.cc:1] Connection closed by peer"), "closed by peer)"),
    ],
)
def test_a_rank_that_cannot_be_reached_is_said_in_one_line(error: Exception, said: str) -> None:
    lost = lost_rank(error)
    assert lost is not None
    assert said in str(lost)
    assert "\n" not in str(lost)


def test_other_errors_are_no_lost_ranks() -> None:
    assert lost_rank(RuntimeError("shapes do not fit")) is None


def _leave_others(group: Group) -> None:
    if group.rank == 1:
        os._exit(1)
    group.gather(None)  # for example while data is scanned


def test_a_rank_that_is_lost_before_the_first_step() -> None:
    processes, results = start_ranks(2, _leave_others)
    rank, said = results.get(timeout=300)
    for process in processes:
        process.join()
    assert rank == 0
    assert "RankLostError: " in said.splitlines()[-1]
