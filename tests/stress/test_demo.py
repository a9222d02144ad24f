"""The default recipe on the built-in data set learns, and does so early."""

from __future__ import annotations

from pathlib import Path

from training import metrics, run

from fastaug.recipes import get_recipe


def test_the_default_recipe_learns(tmp_path: Path) -> None:
    """Half of its epochs; chance is 10%."""
    config = get_recipe("shapes").replace(
        loader="dali", workers=1, epochs=4, tta=0, eval_views=0, out=str(tmp_path / "run")
    )
    curve = [record["top1"] for record in metrics(run(config), "eval")]
    assert curve[0] > 0.15, curve
    assert curve[-1] > 0.7, curve
