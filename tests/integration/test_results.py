"""Families, selection and claims, on run folders with measures made up here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import RunWriter, metrics_lines, training_in, write_unfinished

from fastaug import report
from fastaug.config import TrainConfig
from fastaug.errors import DataError
from fastaug.experiments.claims import Claim, check_claims, paper_sweeps
from fastaug.experiments.difference import difference
from fastaug.experiments.results import find_results
from fastaug.experiments.run import Setting, setting_of
from fastaug.experiments.selection import Chosen, Selected, select

BASE = TrainConfig.from_flat(data="/data/set", model="wrn-16-4", views=4, batch_size=64)


@pytest.fixture
def runs(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "runs", BASE)


def chosen_one(runs: RunWriter) -> Chosen:
    (chosen,) = runs.select_one().chosen.values()
    return chosen


# --- families ---


def test_runs_that_differ_in_what_is_swept_are_one_family(runs: RunWriter) -> None:
    runs.add(0.5)
    runs.add(0.5, views=2, average="logits", kl_weight=0.0, lr=1.0, epochs=3, seed=7)
    runs.add(0.5, augment="none", views=1, recipe="other")
    folder = runs.add(0.5, workers=5, device="cpu", loader="dali", data="/elsewhere/set")
    # A run below two of the folders counts once.
    (family,) = find_results([runs.root, folder, folder.parent]).families
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
def test_runs_that_differ_in_anything_else_are_not(runs: RunWriter, change: dict) -> None:
    runs.add(0.5)
    runs.add(0.5, **change)
    families = find_results([runs.root]).families
    titles = {family.title for family in families}
    assert len(families) == len(titles) == len({family.slug for family in families}) == 2
    if "batch_size" in change:
        assert titles == {f"wrn-16-4 on set, --batch-size {size}" for size in (64, 128)}


def test_sweeps_are_families_of_their_own(runs: RunWriter) -> None:
    for name in ("one", "two"):
        sweep = runs.root / name
        (sweep / "runs").mkdir(parents=True)
        (sweep / "sweep.db").touch()
        runs.add(0.5).rename(sweep / "runs" / "run")
    runs.add(0.5)
    families = find_results([runs.root]).families
    kept_apart = ("in no sweep", "sweep one", "sweep two")
    assert [f.title for f in families] == [f"wrn-16-4 on set, {which}" for which in kept_apart]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", None, "config.json"),
        ("config.json", "[]", "config.json"),
        ("config.json", '{"vews": 1}', "vews"),
        ("config.json", '{"data": 3}', "data"),
        ("config.json", '{"recipe": {}}', "recipe"),
        ("config.json", '{"lr": "1"}', "lr"),
        ("summary.json", "{", "summary.json"),
        ("summary.json", '{"finished": true}', "measures"),
        ("summary.json", '{"finished": true, "measures": {"top1": "x"}}', "top1"),
        ("summary.json", '{"finished": true, "measures": {"top1": 1}, "validation": 3}', "top1"),
        ("summary.json", '{"finished": true, "measures": 3}', "measures"),
    ],
)
def test_a_run_without_a_result_is_named(
    runs: RunWriter, file: str, content: str | None, reason: str
) -> None:
    folder, good = runs.add(0.5), runs.add(0.6)
    (folder / "metrics.jsonl").touch()
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    results = find_results([runs.root])
    assert [run.folder for run in results.runs] == [good], "its neighbour is read"
    (skipped,) = results.skipped
    assert skipped.folder == folder
    assert reason in skipped.reason


def test_the_state_of_a_run(runs: RunWriter) -> None:
    lines = metrics_lines(2, 0.5)  # 25 steps an epoch; BASE has more epochs
    total = 25 * BASE.optim.epochs
    finished = runs.add(0.5)
    capped = runs.add(0.5)
    summary = json.loads((capped / "summary.json").read_text())
    (capped / "summary.json").write_text(json.dumps(summary | {"finished": False, "step": 7}))
    interrupted = write_unfinished(runs.root / "interrupted", BASE, lines)
    diverged = write_unfinished(runs.root / "diverged", BASE, lines)
    (diverged / "bad-batch.pt").touch()
    empty = write_unfinished(runs.root / "empty", BASE)
    running = write_unfinished(runs.root / "running", BASE, lines)
    with training_in(running):
        results = find_results([runs.root])
    found = {run.folder: (run.state, run.step, run.total_steps) for run in results.runs}
    assert found == {
        finished: ("finished", 100, 100),
        capped: ("stopped", 7, 100),
        interrupted: ("stopped", 50, total),
        diverged: ("diverged", 50, total),
        empty: ("stopped", 0, 0),
        running: ("running", 50, total),
    }
    assert [run.folder for family in results.families for run in family.runs] == [finished]
    assert {one.folder for one in results.without_result} == {*found} - {finished}


def test_the_summary_of_a_stop_is_out_of_date_after_more_steps(runs: RunWriter) -> None:
    """Stopped at step 7 by --max-steps, resumed, and interrupted at step 50."""
    folder = runs.add(0.5)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"finished": False, "step": 7}))
    records = metrics_lines(2, 0.5)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (run,) = find_results([runs.root]).runs
    assert (run.state, run.step, run.measures) == ("stopped", 50, {})


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        find_results([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"average": "probs", "kl_weight": 0.5}, Setting(4, "probs", 0.5)),
        ({"views": 1, "average": "probs", "kl_weight": 0.5}, Setting(1, "losses", 0.0)),
        ({"augment": "none", "average": "logits"}, Setting(1, "losses", 0.0, False)),
    ],
)
def test_one_view_has_one_setting(changes: dict, setting: Setting) -> None:
    assert setting_of(BASE.replace(**changes)) == setting


# --- selection ---


def test_the_best_mean_over_the_seeds_is_chosen_by_the_validation_images(runs: RunWriter) -> None:
    for seed, (low, high) in enumerate([(0.70, 0.60), (0.50, 0.66)]):
        runs.add(0.1, held_out=low, lr=0.1, seed=seed)
        runs.add(0.2, held_out=high, lr=0.2, seed=seed)
        runs.add(0.9, held_out=0.1, lr=0.3, seed=seed)
    selected, choice = runs.select_one(), chosen_one(runs)
    assert selected.on == "validation"
    assert (choice.lr, choice.candidates) == (0.2, 3)
    assert choice.score == pytest.approx(0.63)
    assert choice.mean("top1") == pytest.approx(0.2)
    assert [run.config.run.seed for run in choice.runs] == [0, 1]
    (by_test,) = select(selected.family.runs, "test").values()
    assert by_test.lr == 0.3


def test_only_seeds_that_all_candidates_have_decide(runs: RunWriter) -> None:
    runs.add(0.5, held_out=0.60, lr=0.1, seed=0)
    runs.add(0.5, held_out=0.62, lr=0.2, seed=0)
    runs.add(0.5, held_out=0.40, lr=0.2, seed=1)  # the choice was run again, with bad luck
    assert chosen_one(runs).lr == 0.2
    assert len(chosen_one(runs).runs) == 2


def test_a_choice_at_the_edge_of_the_grid_is_known(runs: RunWriter) -> None:
    for lr, top1 in ((0.1, 0.5), (0.2, 0.6), (0.4, 0.7)):
        runs.add(top1, lr=lr, views=1)
        runs.add(-top1, lr=lr, views=2)
        runs.add(top1 % 0.65, lr=lr, views=4)  # the middle one
        runs.add(0.5, lr=lr, views=8)  # all equal: not an edge
    chosen = runs.select_one().chosen
    found = {setting.views: choice.edges for setting, choice in chosen.items()}
    assert found == {1: ("largest lr",), 2: ("smallest lr",), 4: (), 8: ()}


def test_of_equals_the_cheaper_one(runs: RunWriter) -> None:
    for epochs in (20, 10, 30):
        runs.add(0.5, held_out=0.5, epochs=epochs)
    assert chosen_one(runs).epochs == 10


def test_without_held_out_images_the_test_images_decide(runs: RunWriter) -> None:
    runs.add(0.5, lr=0.1)
    runs.add(0.6, lr=0.2)
    assert runs.select_one().on == "test"
    with pytest.raises(DataError, match="--select-on validation"):
        runs.select("validation")


# --- claims: top-1 and invariance for each (K, average, weight), by seed ---

LIKE_THE_PAPER = {
    (1, "losses", 0.0): ([0.50, 0.51, 0.52], 0.6),
    (2, "losses", 0.0): ([0.52, 0.53, 0.54], 0.6),
    (2, "logits", 0.0): ([0.50, 0.52, 0.52], 0.8),
    (4, "losses", 0.0): ([0.54, 0.55, 0.56], 0.6),
    (4, "probs", 0.0): ([0.50, 0.51, 0.53], 0.8),
    (4, "logits", 0.0): ([0.46, 0.48, 0.48], 1.2),
    (4, "losses", 1.0): ([0.580, 0.590, 0.590], 0.2),
    (4, "probs", 1.0): ([0.581, 0.590, 0.592], 0.2),
    (4, "logits", 1.0): ([0.579, 0.591, 0.589], 0.2),
    (4, "losses", 0.5): ([0.580, 0.588, 0.592], 0.3),
    (4, "losses", 2.0): ([0.579, 0.592, 0.588], 0.1),
}
Values = dict[tuple[int, str, float], tuple[list[float], float]]


@pytest.fixture
def claims(runs: RunWriter) -> Callable[[Values], list[Claim]]:
    return lambda values: check_claims(selected_from(runs, values))


def selected_from(runs: RunWriter, values: Values) -> Selected:
    for (views, average, weight), (top1, invariance) in values.items():
        for seed, value in enumerate(top1):
            changed = {"invariance": invariance + 0.01 * seed}
            settings = {"views": views, "average": average, "kl_weight": weight, "seed": seed}
            runs.add(value, changed=changed, **settings)
    return runs.select_one()


def test_what_the_paper_found_is_seen(claims: Callable[[Values], list[Claim]]) -> None:
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
        # No difference, but seeds that vary too much to call it equality.
        (2, {(4, "probs", 1.0): ([0.59, 0.58, 0.59], 0.2)}, "in part"),
        (3, {(4, "losses", 2.0): ([0.57, 0.60, 0.58], 0.1)}, "in part"),
        # Not flat; or flat, but 0 is no worse.
        (3, {(4, "losses", 2.0): ([0.48, 0.49, 0.49], 0.1)}, "in part"),
        (3, {(4, "losses", 0.0): ([0.60, 0.59, 0.61], 0.6)}, "in part"),
    ],
)
def test_what_is_not_there_is_not_seen(
    claims: Callable[[Values], list[Claim]], claim: int, changes: Values, verdict: str
) -> None:
    assert claims(LIKE_THE_PAPER | changes)[claim].verdict == verdict


def test_views_at_test_time_that_do_not_help(runs: RunWriter) -> None:
    for seed in range(3):
        runs.add(0.5, changed={"tta_top1": 0.49 + 0.001 * seed}, seed=seed)
    assert check_claims(runs.select_one())[4].verdict == "not seen"


@pytest.mark.parametrize("views", [1, 4])
def test_claims_without_their_runs_say_what_they_need(
    claims: Callable[[Values], list[Claim]], views: int
) -> None:
    found = claims({(views, "losses", 0.0): ([0.5, 0.6, 0.7], 0.5)})
    assert [claim.verdict for claim in found[:4]] == ["not run"] * 4
    assert all(claim.evidence[0].startswith("needs ") for claim in found[:4])


def test_two_objectives_of_three_are_a_part(claims: Callable[[Values], list[Claim]]) -> None:
    found = claims({key: value for key, value in LIKE_THE_PAPER.items() if key[1] != "probs"})
    assert [claim.verdict for claim in found[1:3]] == ["in part", "in part"]
    assert "2 of 3" in found[1].evidence[-1]


def test_a_difference_is_between_the_same_seeds(runs: RunWriter) -> None:
    values: Values = {
        (4, "losses", 0.0): ([0.1, 0.2, 0.3], 0.5),
        (4, "logits", 0.0): ([0.0, 0.2], 0.5),
    }
    selected = selected_from(runs, values)
    losses, logits = (selected.chosen[Setting(4, a, 0.0)] for a in ("losses", "logits"))
    gap = difference(losses, logits, "top1")
    assert gap is not None
    assert (gap.mean, gap.low, gap.high, gap.seeds) == pytest.approx((0.05, 0.0, 0.1, 2))
    # The deviation of 0.1 and 0 is 0.0707, over the root of two.
    assert gap.error == pytest.approx(0.05)
    # The 97.5% quantile of Student's t with one degree of freedom is 12.706.
    assert gap.margin == pytest.approx(0.6353)
    assert not gap.is_clear
    assert difference(losses, logits, "absent") is None


def test_a_single_seed_is_said_to_be_one(claims: Callable[[Values], list[Claim]]) -> None:
    found = claims({key: ([top1[0]], inv) for key, (top1, inv) in LIKE_THE_PAPER.items()})
    assert found[0].evidence[-2] == "K=4: losses - logits +8.0 points (one seed)"
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


@pytest.mark.parametrize(
    ("kept", "is_sweep"),
    [
        ([*LIKE_THE_PAPER], True),
        # Weights of the regularizer at one K, and K with and without it: grids of the paper.
        ([(4, "losses", weight) for weight in (0.0, 0.5, 1.0, 2.0)], True),
        ([(1, "losses", 0.0), (2, "losses", 0.0), (4, "losses", 0.0), (4, "losses", 1.0)], True),
        # With and without the regularizer, beside a baseline, and numbers of views: comparisons.
        ([(4, "losses", 0.0), (4, "losses", 1.0)], False),
        ([(1, "losses", 0.0), (4, "losses", 0.0), (4, "losses", 1.0)], False),
        ([(1, "losses", 0.0), (2, "losses", 0.0), (4, "losses", 0.0)], False),
    ],
)
def test_what_is_a_sweep_of_the_paper_s_grids(
    runs: RunWriter, kept: list[tuple[int, str, float]], is_sweep: bool
) -> None:
    selected = selected_from(runs, {key: LIKE_THE_PAPER[key] for key in kept})
    assert [sweep.selected for sweep in paper_sweeps([selected])] == [selected] * is_sweep


@pytest.mark.parametrize(("name", "is_sweep"), [("small-capacity", True), ("mine", False)])
def test_a_part_of_a_named_experiment_is_a_sweep(tmp_path: Path, name: str, is_sweep: bool) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "sweep.db").touch()
    runs = RunWriter(tmp_path / name / "runs", BASE)
    two = {key: LIKE_THE_PAPER[key] for key in ((4, "losses", 0.0), (4, "losses", 1.0))}
    assert bool(paper_sweeps([selected_from(runs, two)])) == is_sweep


def test_the_report_prints_each_claim(runs: RunWriter, capsys: pytest.CaptureFixture) -> None:
    selected_from(runs, LIKE_THE_PAPER)
    assert report.main([str(runs.root)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  SEEN ") == 5
    assert "K=4: losses - logits +7.7 ± 0.3 points [+7.0, +8.0]" in printed
