"""The paper's tables as data, with the paper's own numbers beside ours; Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from fastaug.errors import printable
from fastaug.experiments.lookup import AVERAGES, HOW, chosen_at, kl_weight_of, not_run, views_of
from fastaug.experiments.published import Cell, Published, Row, departures, published
from fastaug.experiments.selection import Chosen, Selected

TABLES = ("results", "appendix", "chosen")
"""Names of the tables."""
GAP = "–"  # noqa: RUF001  (a dash, as tables have it)
_OURS = (
    "Ours are means over the seeds ± their standard deviation, without ± where there is one seed; "
    "numbers of the paper stand below them where the experiment is one of the paper's, and the "
    "difference in percentage points where K is the same, too."
)
_TEX = {
    **{c: rf"\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "λ": r"$\lambda$",
    GAP: r"\textendash{}",
}


@dataclass(frozen=True)
class Table:
    """Cells as text, and what is to be said of them."""

    name: str
    """For names of files."""
    title: str
    caption: str
    header: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        body = "\n".join(f"| {' | '.join(map(_markdown, line))} |" for line in lines)
        notes = "".join(f"- {_markdown(note)}\n" for note in self.notes)
        text = f"### {_markdown(self.title)}\n\n{body}\n\n{_markdown(self.caption)}\n"
        return f"{text}\n{notes}" if notes else text

    def latex(self) -> str:
        """For \\usepackage{booktabs}. A rule stands between families."""
        lines = [_tex_row(self.rows[0])] if self.rows else []
        for before, row in pairwise(self.rows):
            lines += [r"\midrule"] * (before[:2] != row[:2]) + [_tex_row(row)]
        notes = "".join(f"\n\\par\\footnotesize {_tex(note)}." for note in self.notes)
        return "\n".join(
            [
                r"\begin{table*}",
                r"\centering",
                r"\small",
                rf"\begin{{tabular}}{{{'l' * len(self.header)}}}",
                r"\toprule",
                _tex_row(self.header),
                r"\midrule",
                *lines,
                r"\bottomrule",
                rf"\end{{tabular}}{notes}",
                rf"\caption{{{_tex(self.title)}. {_tex(self.caption)}}}",
                rf"\label{{tab:{self.name}}}",
                r"\end{table*}",
                "",
            ]
        )


def paper_tables(selected: Sequence[Selected]) -> list[Table]:
    """Tab. 1, the appendix's table, and what was chosen; none where there are no runs."""
    return [_results(selected), _appendix(selected), _chosen(selected)] if selected else []


@dataclass(frozen=True)
class _Part:
    """Four columns: a measure at K=1 and of the three objectives."""

    measure: str
    of: str

    @property
    def header(self) -> list[str]:
        return [f"{self.of}K=1", *(f"{self.of}{average}" for average in AVERAGES)]

    def theirs(self, paper: Published, regularized: bool) -> Row | None:
        return (paper.central if self.measure == "top1" else paper.tta).get(regularized)


def _results(selected: Sequence[Selected]) -> Table:
    caption = "Top-1 test accuracy (%) on central crops, at K = 1 and of the three objectives. "
    return _accuracies("results", "Results", caption, selected, [_Part("top1", "")])


def _appendix(selected: Sequence[Selected]) -> Table:
    caption = "Top-1 test accuracy (%) on central crops and with test-time augmentation (averaged "
    caption += "probabilities), at K = 1 and of the three objectives. "
    parts = [_Part("top1", "central "), _Part("tta_top1", "TTA ")]
    return _accuracies("appendix", "Results with test-time augmentation", caption, selected, parts)


def _accuracies(
    name: str, title: str, caption: str, selected: Sequence[Selected], parts: Sequence[_Part]
) -> Table:
    header = ["dataset", "network", "KL regularizer", "K", "source"]
    header += [column for part in parts for column in part.header]
    rows: list[list[str]] = []
    notes: list[str] = []
    for one in selected:
        for regularized in HOW if _most_views(one) > 1 else [False]:
            rows += _family_rows(one, parts, regularized)
        notes += [f"{one.family.title}: {note}" for note in _family_notes(one, parts)]
    return Table(name, title, caption + _OURS, header, rows, tuple(notes))


def _family_rows(selected: Selected, parts: Sequence[_Part], regularized: bool) -> list[list[str]]:
    """Ours, the paper's, and the difference."""
    paper, views = published(selected.family), _most_views(selected)
    names = [*_names(selected), "yes" if regularized else "no"]
    ours = [values for part in parts for values in _values(selected, part, regularized)]
    rows = [[*names, str(views), "ours", *map(_our_cell, ours)]]
    if paper:
        theirs: list[Cell | None] = []
        for part in parts:
            theirs += part.theirs(paper, regularized) or [None] * len(Row._fields)
        same_views = [True, *[views == paper.views] * len(AVERAGES)] * len(parts)
        differences = [
            _difference(mine, cell) if same else GAP
            for mine, cell, same in zip(ours, theirs, same_views, strict=True)
        ]
        rows.append([*names, str(paper.views), "paper", *map(_paper_cell, theirs)])
        rows.append([*names, "", "difference", *differences])
    return rows


def _values(selected: Selected, part: _Part, regularized: bool) -> list[list[float]]:
    """Of the seeds, in each of a part's columns."""
    return [
        chosen.values(part.measure) if chosen else [] for chosen in _settings(selected, regularized)
    ]


def _settings(selected: Selected, regularized: bool) -> list[Chosen | None]:
    """What the four columns of a row stand for."""
    views, weight = _most_views(selected), kl_weight_of(selected) if regularized else 0.0
    single = chosen_at(selected, 1, "losses", 0.0)
    if views == 1:
        return [single, *[None] * len(AVERAGES)]
    return [single, *(chosen_at(selected, views, average, weight) for average in AVERAGES)]


def _family_notes(selected: Selected, parts: Sequence[_Part]) -> list[str]:
    views, paper = _most_views(selected), published(selected.family)
    settings = {how: _settings(selected, how) for how in HOW}
    found = {(a, how) for how in HOW for a, c in zip(AVERAGES, settings[how][1:], strict=True) if c}
    absent = ["K = 1"] if settings[False][0] is None else []
    if views == 1:
        absent.append("K > 1")
    elif lacking := not_run(found, AVERAGES):
        absent.append(f"{', '.join(lacking)} at K = {views}")
    notes = [f"not run: {', '.join(absent)}"] if absent else []
    for part in parts:
        present = [chosen for row in settings.values() for chosen in row if chosen]
        if any(not chosen.values(part.measure) for chosen in present):
            notes.append(f"some runs have no {part.measure}: were they evaluated with --tta 0?")
    if (weight := kl_weight_of(selected)) != 1:
        notes.append(f"the regularizer's weight is {weight:g}; the paper's is 1")
    if paper and paper.views != views:
        notes.append(f"the paper's objectives are at K = {paper.views}, so only K = 1 is compared")
    if unlike := departures(selected.family):
        notes.append(f"not as in the paper's recipe: {', '.join(unlike)}")
    return notes


def _names(selected: Selected) -> list[str]:
    """Data set and network, as the paper calls them where they are its own."""
    family, paper = selected.family, published(selected.family)
    if paper is None:
        return [
            family.title.removeprefix(f"{family.config.model.model} on "),
            family.config.model.model,
        ]
    _, comma, apart = family.title.partition(", --")  # from another family of the same title
    return [f"{paper.dataset}{comma}{apart}", paper.network]


def _most_views(selected: Selected) -> int:
    return max(views_of(selected), default=1)


def _our_cell(values: list[float]) -> str:
    if not values:
        return GAP
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread}"


def _paper_cell(cell: Cell | None) -> str:
    if cell is None:
        return GAP
    spread = "" if cell.spread is None else f" ± {100 * cell.spread:.1f}"
    return f"{100 * cell.value:.1f}{spread}"


def _difference(values: list[float], cell: Cell | None) -> str:
    if not values or cell is None:
        return GAP
    return f"{round(100 * (fmean(values) - cell.value), 1) + 0.0:+.1f}"  # no -0.0


def _chosen(selected: Sequence[Selected]) -> Table:
    caption = (
        "The learning rate (before --lr-scaling and --schedule) and the epochs with the best mean "
        "top-1 accuracy on the central crops of the images that are named, of all pairs that were "
        "run; score is that accuracy (%), over the seeds that all pairs have."
    )
    header = ["dataset", "network", "setting", "lr", "epochs", "seeds", "score"]
    header += ["chosen from", "chosen by"]
    rows = [
        [
            *_names(one),
            chosen.setting.label,
            f"{chosen.lr:g}",
            str(chosen.epochs),
            str(len(chosen.runs)),
            f"{100 * chosen.score:.1f}",
            str(chosen.candidates),
            "held-out images" if one.on == "validation" else "test images",
        ]
        for one in selected
        for chosen in one.chosen.values()
    ]
    return Table("chosen", "What was chosen", caption, header, rows)


def _markdown(text: str) -> str:
    return printable(text).replace("|", "\\|")


def _tex(text: str) -> str:
    """Two hyphens are a flag's, and no dash."""
    letters = (_TEX.get(letter, letter) for letter in printable(text))
    return "".join(letters).replace("--", "-{}-")


def _tex_row(cells: Sequence[str]) -> str:
    """A hyphen in front of a number is a minus."""
    texts = [f"$-${_tex(cell[1:])}" if cell.startswith("-") else _tex(cell) for cell in cells]
    return " & ".join(texts) + r" \\"
