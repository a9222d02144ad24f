"""Tables as strings that were written by hand, from runs whose measures were made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import RunWriter

from fastaug.config import TrainConfig
from fastaug.experiments.published import PUBLISHED, departures, published
from fastaug.experiments.selection import SelectOn
from fastaug.experiments.tables import Table, paper_tables
from fastaug.recipes import get_recipe

# Typed from the paper's Tab. 1 and its appendix, apart from the product's: K=1, losses, probs,
# logits without the regularizer, then with it.
TAB_1 = {
    "cifar100-wrn-16-4": "741 750 725 643  741 759 758 759",
    "imagenet-nf-resnet101": "782 793 766 696  782 801 804 804",
    "imagenet-nfnet-f0": "803 813 788 717  803 819 822 819",
}
APPENDIX_CENTRAL = {
    "cifar100-wrn-16-4": "741 750 725 643  741 759 758 759",
    "imagenet-nf-resnet101": "782 793 766 696  782 801 804 804",
    "imagenet-nf-resnet50": "773 781 760 695  773 784 789 787",
}
APPENDIX_TTA = {
    "cifar100-wrn-16-4": "759 768 748 715  759 772 772 772",
    "imagenet-nf-resnet101": "801 808 786 757  801 806 811 810",
    "imagenet-nf-resnet50": "793 799 782 753  793 792 797 797",
}
WRN_SPREADS = "3 1 1 1  3 1 2 1"


def thousandths(text: str) -> list[float]:
    return [int(number) / 1000 for number in text.split()]


@pytest.mark.parametrize(
    ("kind", "typed"),
    [("central", TAB_1), ("central", APPENDIX_CENTRAL), ("tta", APPENDIX_TTA)],
)
def test_the_papers_numbers(kind: str, typed: Mapping[str, str]) -> None:
    for recipe, numbers in typed.items():
        rows = getattr(PUBLISHED[recipe], kind)
        assert [cell.value for how in (False, True) for cell in rows[how]] == thousandths(numbers)


def test_the_papers_spreads_and_multiplicities() -> None:
    wrn = PUBLISHED["cifar100-wrn-16-4"]
    spreads = [cell.spread for how in (False, True) for cell in wrn.central[how]]
    assert spreads == thousandths(WRN_SPREADS)
    others = [p for name, p in PUBLISHED.items() if name != "cifar100-wrn-16-4"]
    assert {cell.spread for p in others for row in p.central.values() for cell in row} == {None}
    assert {name: p.views for name, p in PUBLISHED.items()} == {
        "cifar100-wrn-16-4": 16,
        "imagenet-nf-resnet101": 8,
        "imagenet-nf-resnet50": 8,
        "imagenet-nfnet-f0": 8,
    }
    assert PUBLISHED["imagenet-nfnet-f0"].tta == {}


WRN = get_recipe("cifar100-wrn-16-4").replace(data="/data/cifar-100-python", views=1)


@pytest.fixture
def runs(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "runs", WRN)


def table(runs: RunWriter, name: str, on: SelectOn = "auto") -> Table:
    return next(found for found in paper_tables(runs.select(on)) if found.name == name)


def test_ours_beside_the_papers(runs: RunWriter) -> None:
    """Two seeds at K=1, one elsewhere; logits with the regularizer were not run."""
    for seed, top1 in enumerate((0.740, 0.748)):
        runs.add(top1, changed={"tta_top1": 0.76}, seed=seed)
    for average, weight, top1 in [
        ("losses", 0.0, 0.7512),
        ("probs", 0.0, 0.7248),
        ("logits", 0.0, 0.650),
        ("losses", 1.0, 0.7589),
        ("probs", 1.0, 0.770),
    ]:
        changed = {"tta_top1": top1 + 0.01}
        runs.add(top1, changed=changed, views=16, average=average, kl_weight=weight)
    assert [one.name for one in paper_tables(runs.select())] == ["results", "appendix", "chosen"]
    results = table(runs, "results")
    assert results.header == (
        ["dataset", "network", "KL regularizer", "K", "source", "K=1", "losses", "probs", "logits"]
    )
    assert ["|".join(row) for row in results.rows] == [
        "CIFAR-100|WRN 16-4|no|16|ours|74.4 ± 0.6|75.1|72.5|65.0",
        "CIFAR-100|WRN 16-4|no|16|paper|74.1 ± 0.3|75.0 ± 0.1|72.5 ± 0.1|64.3 ± 0.1",
        "CIFAR-100|WRN 16-4|no||difference|+0.3|+0.1|+0.0|+0.7",
        "CIFAR-100|WRN 16-4|yes|16|ours|74.4 ± 0.6|75.9|77.0|–",  # noqa: RUF001
        "CIFAR-100|WRN 16-4|yes|16|paper|74.1 ± 0.3|75.9 ± 0.1|75.8 ± 0.2|75.9 ± 0.1",
        "CIFAR-100|WRN 16-4|yes||difference|+0.3|+0.0|+1.2|–",  # noqa: RUF001
    ]
    (note,) = results.notes
    assert note.endswith("not run: average logits with the regularizer at K = 16")
    assert ["|".join(row[5:]) for row in table(runs, "appendix").rows[:3]] == [
        "74.4 ± 0.6|75.1|72.5|65.0|76.0 ± 0.0|76.1|73.5|66.0",
        "74.1 ± 0.3|75.0 ± 0.1|72.5 ± 0.1|64.3 ± 0.1|75.9|76.8|74.8|71.5",
        "+0.3|+0.1|+0.0|+0.7|+0.1|-0.7|-1.3|-5.5",
    ]


def test_another_k_than_the_papers_is_compared_only_at_one(runs: RunWriter) -> None:
    runs.add(0.731)
    runs.add(0.75, views=4, kl_weight=0.0)
    results = table(runs, "results")
    assert results.rows[2][5:] == ["-1.0", "–", "–", "–"]  # noqa: RUF001
    assert [row[3] for row in results.rows[:2]] == ["4", "16"]
    assert any("K = 16" in note for note in results.notes)


@pytest.mark.parametrize(
    "change",
    [
        {"train_images": 1000},
        {"model": "wrn-10-1"},
        {"augment": "randaugment"},
        {"recipe": "shapes"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_small_versions_have_rows_without_the_papers_numbers(
    runs: RunWriter, change: dict[str, str]
) -> None:
    runs.add(0.4, **change)
    assert published(runs.select_one().family) is None
    results = table(runs, "results")
    assert [row[4] for row in results.rows] == ["ours"]
    assert results.rows[0][5:] == ["40.0", "–", "–", "–"]  # noqa: RUF001
    assert "K > 1" in results.notes[0]


def test_differences_from_the_recipe_are_noted(runs: RunWriter) -> None:
    runs.add(0.4, weight_decay=1e-3, views=16, kl_weight=0.5)
    assert departures(runs.select_one().family) == ["--weight-decay 0.0005 (here: 0.001)"]
    results = table(runs, "results")
    assert any("--weight-decay 0.0005 (here: 0.001)" in note for note in results.notes)
    assert results.rows[3][6] == "40.0"
    assert any("weight is 0.5" in note for note in results.notes)


def test_what_was_chosen(tmp_path: Path) -> None:
    config = TrainConfig.from_flat(views=1, validation=0.1, train_images=1000)
    runs = RunWriter(tmp_path / "runs", config)
    for lr, held_out, test in [(0.1, 0.60, 0.55), (0.2, 0.62, 0.50)]:
        runs.add(test, held_out=held_out, lr=lr)
    assert ["|".join(row) for row in table(runs, "chosen").rows] == [
        "shapes (1,000 images)|wrn-10-1|K=1|0.2|12|1|62.0|2|held-out images"
    ]
    assert ["|".join(row) for row in table(runs, "chosen", "test").rows] == [
        "shapes (1,000 images)|wrn-10-1|K=1|0.1|12|1|55.0|2|test images"
    ]


def test_no_runs_make_no_tables() -> None:
    assert paper_tables([]) == []


ODD = Table(
    "odd",
    "A & B",
    "100% of it",
    ["a|b", "c_d", "e"],
    [["x", "y", "1 ± 2"], ["x", "y", "-0.3"], ["z", "y", "–"]],  # noqa: RUF001
    ("see --tta_x {1}",),
)


def test_markdown() -> None:
    assert ODD.markdown() == (
        "### A & B\n\n"
        "| a\\|b | c_d | e |\n| --- | --- | --- |\n"
        "| x | y | 1 ± 2 |\n| x | y | -0.3 |\n| z | y | – |\n\n"  # noqa: RUF001
        "100% of it\n\n- see --tta_x {1}\n"
    )


def test_latex() -> None:
    lines = ODD.latex().split("\n")
    assert r"\begin{tabular}{lll}" in lines
    body = lines[lines.index(r"\toprule") : lines.index(r"\bottomrule") + 1]
    assert body == [
        r"\toprule",
        r"a|b & c\_d & e \\",
        r"\midrule",
        r"x & y & 1 $\pm$ 2 \\",
        r"x & y & $-$0.3 \\",
        r"\midrule",
        r"z & y & \textendash{} \\",
        r"\bottomrule",
    ]
    assert r"\par\footnotesize see -{}-tta\_x \{1\}." in lines
    assert r"\caption{A \& B. 100\% of it}" in lines


def test_latex_of_a_hostile_name_has_no_command_of_its_own() -> None:
    odd = replace(ODD, rows=[[r"\input{x}", "a\nb", "$^~#"]], notes=())
    row = next(line for line in odd.latex().split("\n") if "input" in line)
    assert row == (
        r"\textbackslash{}input\{x\} & a\textbackslash{}nb & "
        r"\$\textasciicircum{}\textasciitilde{}\# \\"
    )
