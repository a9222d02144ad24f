"""Families, selection and claims, on run folders with measures made up here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from run_folders import write_run

from fastaug import report
from fastaug.config import TrainConfig
from fastaug.errors import DataError
from fastaug.experiments.claims import Claim, check_claims, difference
from fastaug.experiments.results import Setting, find_results, setting_of
from fastaug.experiments.selection import Selected, select, select_families

BASE = TrainConfig.from_flat(data="/data/set", model="wrn-16-4", views=4, batch_size=64)


def measures(top1: float, invariance: float = 0.5, tta: float | None = None) -> dict[str, float]:
    return {
        "top1": top1,
        "tta_top1": top1 + 0.02 if tta is None else tta,
        "invariance": invariance,
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_one(top1: float, validation: float | None = None, **changes: object) -> Path:
        config = BASE.replace(**changes)
        held_out = None if validation is None else {"top1": validation}
        folder = tmp_path / "runs" / str(len(list((tmp_path / "runs").glob("*"))))
        return write_run(folder, config, measures(top1), held_out)

    (tmp_path / "runs").mkdir()
    return write_one


def chosen(tmp_path: Path) -> Mapping[Setting, object]:
    (selected,) = select_families(find_results([tmp_path]))
    return selected.chosen


class TestFamilies:
    def test_runs_that_differ_in_what_is_swept_are_one_family(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        write(0.5)
        write(0.5, views=2, average="logits", kl_weight=0.0, lr=1.0, epochs=3, seed=7)
        write(0.5, augment="none", views=1, recipe="other")
        write(0.5, workers=5, device="cpu", loader="dali", out="x", data="/elsewhere/set")
        (family,) = find_results([tmp_path]).families
        assert len(family.runs) == 4
        assert family.title == "wrn-16-4 on set"
        assert family.slug == "wrn-16-4-on-set"

    @pytest.mark.parametrize(
        "change",
        [
            {"model": "wrn-16-8"},
            {"data": "/data/other"},
            {"augment": "randaugment"},
            {"batch_size": 128},
            {"train_images": 100},
            {"label_smoothing": 0.1},
        ],
    )
    def test_runs_that_differ_in_anything_else_are_not(
        self, write: Callable[..., Path], tmp_path: Path, change: dict
    ) -> None:
        write(0.5)
        write(0.5, **change)
        families = find_results([tmp_path]).families
        assert len(families) == 2
        assert len({family.title for family in families}) == 2
        assert len({family.slug for family in families}) == 2

    def test_families_of_one_name_say_what_sets_them_apart(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        write(0.5)
        write(0.5, batch_size=128)
        titles = {family.title for family in find_results([tmp_path]).families}
        assert titles == {
            "wrn-16-4 on set, --batch-size 64",
            "wrn-16-4 on set, --batch-size 128",
        }

    def test_a_run_below_two_of_the_folders_is_one(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        folder = write(0.5)
        (family,) = find_results([tmp_path, folder, folder.parent]).families
        assert len(family.runs) == 1

    @pytest.mark.parametrize(
        ("file", "content", "reason"),
        [
            ("config.json", "{", "cannot be read"),
            ("config.json", "[]", "no object"),
            ("config.json", '{"vews": 1}', "unknown setting"),
            ("config.json", '{"data": 3}', "data is no str"),
            ("config.json", '{"recipe": {}}', "recipe is no str"),
            ("config.json", '{"lr": "1"}', "cannot be read"),
            ("summary.json", '{"finished": true}', "cannot be read"),
            ("summary.json", '{"finished": true, "measures": {"top1": "x"}}', "top1 is no number"),
            (
                "summary.json",
                '{"finished": true, "measures": {"top1": 1}, "validation": 3}',
                "cannot be read",
            ),
            ("summary.json", '{"step": 7, "measures": {"top1": 0.5}}', "stopped at step 7"),
        ],
    )
    def test_a_run_that_cannot_be_read_is_named(
        self,
        write: Callable[..., Path],
        tmp_path: Path,
        file: str,
        content: str,
        reason: str,
    ) -> None:
        (write(0.5) / file).write_text(content)
        results = find_results([tmp_path])
        assert results.families == ()
        (unfinished,) = results.unfinished
        assert reason in unfinished.reason

    def test_unfinished_and_diverged_runs(self, write: Callable[..., Path], tmp_path: Path) -> None:
        first, second = write(0.5), write(0.5)
        (first / "summary.json").unlink()
        (second / "summary.json").unlink()
        (second / "bad-batch.pt").touch()
        reasons = [run.reason for run in find_results([tmp_path]).unfinished]
        assert [reason.partition(":")[0] for reason in reasons] == ["not finished", "diverged"]

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no such folder"):
            find_results([tmp_path / "nowhere"])


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "setting"),
        [
            ({"average": "probs", "kl_weight": 0.5}, Setting(4, "probs", 0.5)),
            ({"views": 1, "average": "probs", "kl_weight": 0.5}, Setting(1, "losses", 0.0)),
            ({"augment": "none", "average": "logits"}, Setting(1, "losses", 0.0, False)),
        ],
    )
    def test_one_view_has_one_setting(self, changes: dict, setting: Setting) -> None:
        assert setting_of(BASE.replace(**changes)) == setting


class TestSelection:
    def test_the_best_mean_over_the_seeds_is_chosen_by_the_validation_images(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        for seed, (low, high) in enumerate([(0.70, 0.60), (0.50, 0.66)]):
            write(0.1, low, lr=0.1, seed=seed)
            write(0.2, high, lr=0.2, seed=seed)
        write(0.9, 0.1, lr=0.3, seed=0)
        write(0.9, 0.1, lr=0.3, seed=1)
        (selected,) = select_families(find_results([tmp_path]))
        assert selected.on == "validation"
        (choice,) = selected.chosen.values()
        assert (choice.lr, choice.candidates) == (0.2, 3)
        assert choice.score == pytest.approx(0.63)
        assert choice.mean("top1") == pytest.approx(0.2)
        assert [run.config.run.seed for run in choice.runs] == [0, 1]
        (by_test,) = select(selected.family.runs, "test").values()
        assert by_test.lr == 0.3

    def test_only_seeds_that_all_candidates_have_decide(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        write(0.5, 0.60, lr=0.1, seed=0)
        write(0.5, 0.62, lr=0.2, seed=0)
        write(0.5, 0.40, lr=0.2, seed=1)  # the choice was run again, and had bad luck
        (choice,) = chosen(tmp_path).values()
        assert choice.lr == 0.2
        assert len(choice.runs) == 2

    def test_a_choice_at_the_edge_of_the_grid_is_known(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        for lr, top1 in ((0.1, 0.5), (0.2, 0.6), (0.4, 0.7)):
            write(top1, lr=lr, views=1)
            write(-top1, lr=lr, views=2)
            write(top1 % 0.65, lr=lr, views=4)  # the middle one
            write(0.5, lr=lr, views=8)  # all equal: no end of them
        found = {setting.views: choice.edges for setting, choice in chosen(tmp_path).items()}
        assert found == {1: ("largest lr",), 2: ("smallest lr",), 4: (), 8: ()}

    def test_of_equals_the_cheaper_one(self, write: Callable[..., Path], tmp_path: Path) -> None:
        for epochs in (20, 10, 30):
            write(0.5, 0.5, epochs=epochs)
        (choice,) = chosen(tmp_path).values()
        assert choice.epochs == 10

    def test_without_held_out_images_the_test_images_decide(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        write(0.5, lr=0.1)
        write(0.6, lr=0.2)
        results = find_results([tmp_path])
        (selected,) = select_families(results)
        assert selected.on == "test"
        with pytest.raises(DataError, match="has held out no images; train with --validation"):
            select_families(results, "validation")


# --- claims: top-1 and invariance for each (K, average, weight), by seed ---

LIKE_THE_PAPER = {
    (1, "losses", 0.0): ([0.50, 0.51, 0.52], 0.6),
    (2, "losses", 0.0): ([0.52, 0.53, 0.54], 0.6),
    (2, "logits", 0.0): ([0.50, 0.52, 0.52], 0.8),
    (4, "losses", 0.0): ([0.54, 0.55, 0.56], 0.6),
    (4, "probs", 0.0): ([0.50, 0.51, 0.53], 0.8),
    (4, "logits", 0.0): ([0.46, 0.48, 0.48], 1.2),
    (4, "losses", 1.0): ([0.58, 0.59, 0.59], 0.2),
    (4, "probs", 1.0): ([0.59, 0.58, 0.59], 0.2),
    (4, "logits", 1.0): ([0.57, 0.60, 0.59], 0.2),
    (4, "losses", 0.5): ([0.59, 0.58, 0.59], 0.3),
    (4, "losses", 2.0): ([0.57, 0.60, 0.58], 0.1),
}
Runs = dict[tuple[int, str, float], tuple[list[float], float]]


@pytest.fixture
def claims(tmp_path: Path) -> Callable[..., list[Claim]]:
    def of(runs: Runs) -> list[Claim]:
        return list(check_claims(selected_from(tmp_path, runs)))

    return of


def selected_from(folder: Path, runs: Runs) -> Selected:
    for (views, average, weight), (top1, invariance) in runs.items():
        for seed, value in enumerate(top1):
            config = BASE.replace(views=views, average=average, kl_weight=weight, seed=seed)
            name = f"{views}-{average}-{weight}-{seed}"
            write_run(folder / name, config, measures(value, invariance + 0.01 * seed))
    (selected,) = select_families(find_results([folder]))
    return selected


def test_what_the_paper_found_is_seen(claims: Callable[..., list[Claim]]) -> None:
    found = claims(LIKE_THE_PAPER)
    assert [claim.verdict for claim in found] == ["seen"] * 5
    # (0.02 + 0.01 + 0.02) / 3 and (0.08 + 0.07 + 0.08) / 3.
    assert found[0].evidence == (
        "K=2: losses - logits +1.7 ± 0.3 points [+1.0, +2.0]",
        "K=4: losses - logits +7.7 ± 0.3 points [+7.0, +8.0]",
    )


@pytest.mark.parametrize(
    ("claim", "changes", "verdict"),
    [
        # Logits are as good at the largest K, but the gap has grown; or neither.
        (0, {(4, "logits", 0.0): ([0.50, 0.55, 0.50], 1.2)}, "in part"),
        (0, {(4, "logits", 0.0): ([0.56, 0.57, 0.58], 1.2)}, "not seen"),
        # It wins, but no more than at K=2.
        (0, {(2, "logits", 0.0): ([0.42, 0.43, 0.44], 0.8)}, "in part"),
        # The regularizer costs accuracy of one of them, or makes one less invariant.
        (1, {(4, "probs", 1.0): ([0.49, 0.48, 0.48], 0.2)}, "in part"),
        (1, {(4, "logits", 1.0): ([0.57, 0.60, 0.59], 1.5)}, "in part"),
        # One objective stays behind, a little or as much as without.
        (2, {(4, "logits", 1.0): ([0.56, 0.57, 0.57], 0.2)}, "in part"),
        (2, {(4, "logits", 1.0): ([0.50, 0.51, 0.51], 0.2)}, "not seen"),
        # Not flat; or flat, but 0 is no worse.
        (3, {(4, "losses", 2.0): ([0.48, 0.49, 0.49], 0.1)}, "in part"),
        (3, {(4, "losses", 0.0): ([0.60, 0.59, 0.61], 0.6)}, "in part"),
    ],
)
def test_what_is_not_there_is_not_seen(
    claims: Callable[..., list[Claim]], claim: int, changes: Runs, verdict: str
) -> None:
    assert claims(LIKE_THE_PAPER | changes)[claim].verdict == verdict


def test_views_at_test_time_that_do_not_help(tmp_path: Path) -> None:
    for seed in range(3):
        config = BASE.replace(seed=seed)
        write_run(tmp_path / str(seed), config, measures(0.5, tta=0.49 + 0.001 * seed))
    (selected,) = select_families(find_results([tmp_path]))
    assert check_claims(selected)[4].verdict == "not seen"


def test_claims_without_their_runs_say_what_they_need(claims: Callable[..., list[Claim]]) -> None:
    found = claims({(4, "losses", 0.0): ([0.5, 0.6, 0.7], 0.5)})
    assert [claim.verdict for claim in found[:4]] == ["not run"] * 4
    assert all(claim.evidence[0].startswith("needs ") for claim in found[:4])


def test_two_objectives_of_three_are_a_part(claims: Callable[..., list[Claim]]) -> None:
    runs = {key: value for key, value in LIKE_THE_PAPER.items() if key[1] != "probs"}
    found = claims(runs)
    assert [claim.verdict for claim in found[1:3]] == ["in part", "in part"]
    assert found[1].evidence[-1] == "objectives that were run: 2 of 3"


def test_a_difference_is_between_the_same_seeds(tmp_path: Path) -> None:
    runs: Runs = {
        (4, "losses", 0.0): ([0.1, 0.2, 0.3], 0.5),
        (4, "logits", 0.0): ([0.0, 0.2], 0.5),
    }
    selected = selected_from(tmp_path, runs)
    losses, logits = (selected.chosen[Setting(4, a, 0.0)] for a in ("losses", "logits"))
    gap = difference(losses, logits, "top1")
    assert gap is not None
    assert (gap.mean, gap.low, gap.high, gap.seeds) == pytest.approx((0.05, 0.0, 0.1, 2))
    # The deviation of 0.1 and 0 is 0.0707, over the root of two.
    assert gap.error == pytest.approx(0.05)
    assert not gap.is_clear
    assert difference(losses, logits, "nll") is None


def test_a_single_seed_is_said_to_be_one(claims: Callable[..., list[Claim]]) -> None:
    found = claims({key: ([top1[0]], inv) for key, (top1, inv) in LIKE_THE_PAPER.items()})
    assert found[0].evidence[-2:] == (
        "K=4: losses - logits +8.0 points (one seed)",
        "one seed: a difference cannot be told from noise",
    )
    assert {claim.verdict for claim in found} == {"in part"}


def test_summaries_are_as_the_trainer_writes_them(
    tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """A real run is found and read: the made-up ones are like it."""
    from fastaug.engine.trainer import Trainer

    Trainer(tiny(validation=0.25, out=str(tmp_path / "real"))).fit()
    (family,) = find_results([tmp_path / "real"]).families
    (run,) = family.runs
    assert run.measures == json.loads((tmp_path / "real/summary.json").read_text())["measures"]
    assert run.validation is not None
    assert set(run.measures) == set(run.validation)
    assert {"top1", "tta_top1", "tta_top1_at_1", "tta_top1_at_2", "invariance"} <= set(run.measures)


def test_the_report_says_each_claim(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    selected_from(tmp_path / "runs", LIKE_THE_PAPER)
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "report.html")]) == 0
    said = capsys.readouterr().out
    assert said.count("  SEEN ") == 5
    assert "K=4: losses - logits +7.7 ± 0.3 points [+7.0, +8.0]" in said
    assert (tmp_path / "report.html").stat().st_size > 10_000
