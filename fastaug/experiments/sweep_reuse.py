"""Runs of earlier sweeps that a sweep takes over: --reuse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastaug.experiments.record import same_run
from fastaug.experiments.results import find_results
from fastaug.experiments.run import Run
from fastaug.experiments.sweep_plan import Configs, Plan
from fastaug.runtime.atomic import atomic_write, write_json

Earlier = Mapping[tuple[Any, ...], Run]


def read_earlier(folders: Sequence[str]) -> Earlier:
    """The finished runs in some folders, by what makes two runs the same."""
    if not folders:
        return {}
    runs = find_results(folders).runs
    return {same_run(run.config): run for run in runs if run.state == "finished"}


def reuse_runs(plan: Plan, configs: Configs, earlier: Earlier) -> int:
    """Write the folders of the runs that are known from earlier; returns their number.

    A folder gets the settings, the measures and the training curve, which is what choosing and the
    report need; it has no weights.
    """
    reused = 0
    for name, config in configs.items():
        folder = plan.run_folder(name)
        run = earlier.get(same_run(config))
        if run is None or (folder / "config.json").exists():  # begun: it is continued
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / "metrics.jsonl") as temporary:
            lines = (json.dumps(record) + "\n" for record in run.records)
            temporary.write_text("".join(lines), encoding="utf-8")
        write_json(folder / "config.json", config.replace(out=str(folder)).to_flat())
        write_json(folder / "summary.json", run.summary)  # last: with it the run counts as finished
        reused += 1
    return reused
