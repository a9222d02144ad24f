"""The paper's tables with the paper's results and ours, as Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from fastaug.errors import printable
from fastaug.experiments.published import Cell, Published, Row, departures, published
from fastaug.experiments.run import AVERAGES
from fastaug.experiments.selection import REGULARIZER, Chosen, Selected, missing_objectives

TABLES = ("results", "appendix", "chosen")
GAP = "–"  # noqa: RUF001  (an en dash for an empty cell)
_OURS = (
    "Ours: mean over the seeds ± standard deviation, without ± for one seed. For the paper's "
    "experiments, the next rows have the paper's results and, at the same K, the difference in "
    "percentage points."
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
    """A table of texts with caption and notes."""

    name: str
    """Stem of the file names."""
    title: str
    caption: str
    header: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()

    def files(self) -> dict[str, bytes]:
        return {
            f"{self.name}.md": self.markdown().encode(),
            f"{self.name}.tex": self.latex().encode(),
        }

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        body = "\n".join(f"| {' | '.join(map(_markdown, line))} |" for line in lines)
        notes = "".join(f"- {_markdown(note)}\n" for note in self.notes)
        text = f"### {_markdown(self.title)}\n\n{body}\n\n{_markdown(self.caption)}\n"
        return f"{text}\n{notes}" if notes else text

    def latex(self) -> str:
        """LaTeX for \\usepackage{booktabs}, with a rule between families."""
        lines = [_tex_row(self.rows[0])] if self.rows else []
        for before, row in pairwise(self.rows):
            lines += [r"\midrule"] * (before[:2] != row[:2]) + [_tex_row(row)]
        notes = "".join(f"\n\\par\\footnotesize {_tex(note)}." for note in self.notes)
        body = "\n".join([r"\toprule", _tex_row(self.header), r"\midrule", *lines, r"\bottomrule"])
        return (
            "\\begin{table*}\n\\centering\n\\small\n"
            f"\\begin{{tabular}}{{{'l' * len(self.header)}}}\n{body}\n\\end{{tabular}}{notes}\n"
            f"\\caption{{{_tex(self.title)}. {_tex(self.caption)}}}\n"
            f"\\label{{tab:{self.name}}}\n\\end{{table*}}\n"
        )


def paper_tables(selected: Sequence[Selected]) -> list[Table]:
    """Tab. 1, the appendix's table, and the chosen learning rates and epochs; [] without runs."""
    return [_results(selected), _appendix(selected), _chosen(selected)] if selected else []


@dataclass(frozen=True)
class _Part:
    """Four columns: a measure at K=1 and for the three objectives."""

    measure: str
    of: str

    @property
    def header(self) -> list[str]:
        return [f"{self.of}K=1", *(f"{self.of}{average}" for average in AVERAGES)]

    def theirs(self, paper: Published, regularized: bool) -> Row | None:
        return (paper.central if self.measure == "top1" else paper.tta).get(regularized)


def _results(selected: Sequence[Selected]) -> Table:
    caption = "Top-1 test accuracy (%) on central crops, at K = 1 and for the three objectives. "
    return _accuracies("results", "Results", caption, selected, [_Part("top1", "")])


def _appendix(selected: Sequence[Selected]) -> Table:
    caption = "Top-1 test accuracy (%) on central crops and with test-time augmentation (averaged "
    caption += "probabilities), at K = 1 and for the three objectives. "
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
        for regularized in REGULARIZER if one.largest_k > 1 else [False]:
            rows += _family_rows(one, parts, regularized)
        notes += [f"{one.family.title}: {note}" for note in _family_notes(one, parts)]
    return Table(name, title, caption + _OURS, header, rows, tuple(notes))


def _family_rows(selected: Selected, parts: Sequence[_Part], regularized: bool) -> list[list[str]]:
    """Our row, the paper's, and the difference."""
    paper, views = published(selected.family), selected.largest_k
    names = [*_names(selected), "yes" if regularized else "no"]
    settings = _settings(selected, regularized)
    ours = [_our_cell(c.values(part.measure) if c else []) for part in parts for c in settings]
    rows = [[*names, str(views), "ours", *map(_percent, ours)]]
    if paper:
        theirs: list[Cell | None] = []
        for part in parts:
            theirs += part.theirs(paper, regularized) or [None] * len(Row._fields)
        same_views = [True, *[views == paper.views] * len(AVERAGES)] * len(parts)
        differences = [
            _difference(mine, cell) if same else GAP
            for mine, cell, same in zip(ours, theirs, same_views, strict=True)
        ]
        rows.append([*names, str(paper.views), "paper", *map(_percent, theirs)])
        rows.append([*names, "", "difference", *differences])
    return rows


def _settings(selected: Selected, regularized: bool) -> list[Chosen | None]:
    """The chosen runs in the four columns of a row."""
    views, single = selected.largest_k, selected.at(1, "losses")
    if views == 1:
        return [single, *[None] * len(AVERAGES)]
    return [single, *(selected.at(views, a, regularized=regularized) for a in AVERAGES)]


def _family_notes(selected: Selected, parts: Sequence[_Part]) -> list[str]:
    views, paper = selected.largest_k, published(selected.family)
    settings = {how: _settings(selected, how) for how in REGULARIZER}
    found = {
        (average, how)
        for how, (_, *row) in settings.items()
        for average, chosen in zip(AVERAGES, row, strict=True)
        if chosen
    }
    absent = ["K = 1"] if settings[False][0] is None else []
    if views == 1:
        absent.append("K > 1")
    elif lacking := missing_objectives(found, AVERAGES):
        absent.append(f"{', '.join(lacking)} at K = {views}")
    notes = [f"not run: {', '.join(absent)}"] if absent else []
    for part in parts:
        present = [chosen for row in settings.values() for chosen in row if chosen]
        if any(not chosen.values(part.measure) for chosen in present):
            notes.append(f"some runs have no {part.measure}; evaluate with --tta > 0")
    if (weight := selected.regularizer_weight) != 1:
        notes.append(f"the KL weight is {weight:g}; the paper's is 1")
    if paper and paper.views != views:
        notes.append(
            f"the paper has K = {paper.views} for the objectives, so only K = 1 is compared"
        )
    if unlike := departures(selected.family):
        notes.append(f"differs from the paper's recipe: {', '.join(unlike)}")
    return notes


def _names(selected: Selected) -> list[str]:
    """Data set and network; the paper's names for the paper's experiments."""
    family, paper = selected.family, published(selected.family)
    if paper is None:
        network = family.config.model.model
        return [family.title.removeprefix(f"{network} on "), network]
    _, comma, apart = family.title.partition(", --")  # differs from a family of the same title
    return [f"{paper.dataset}{comma}{apart}", paper.network]


def _our_cell(values: list[float]) -> Cell | None:
    if not values:
        return None
    return Cell(fmean(values), stdev(values) if len(values) > 1 else None)


def _percent(cell: Cell | None) -> str:
    if cell is None:
        return GAP
    spread = "" if cell.spread is None else f" ± {100 * cell.spread:.1f}"
    return f"{100 * cell.value:.1f}{spread}"


def _difference(ours: Cell | None, theirs: Cell | None) -> str:
    if ours is None or theirs is None:
        return GAP
    return f"{round(100 * (ours.value - theirs.value), 1) + 0.0:+.1f}"  # no -0.0


def _chosen(selected: Sequence[Selected]) -> Table:
    caption = (
        "Learning rate (before --lr-scaling and --schedule) and epochs with the best mean top-1 "
        'accuracy on central crops of the images under "chosen by". score: that accuracy (%), over '
        "the seeds that all candidates have. chosen from: number of candidates."
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
    return Table("chosen", "Chosen learning rates and epochs", caption, header, rows)


def _markdown(text: str) -> str:
    return printable(text).replace("|", "\\|")


def _tex(text: str) -> str:
    """Escape for LaTeX; two hyphens belong to a flag and are no dash."""
    letters = (_TEX.get(letter, letter) for letter in printable(text))
    return "".join(letters).replace("--", "-{}-")


def _tex_row(cells: Sequence[str]) -> str:
    """A row of cells; a leading hyphen is a minus sign."""
    texts = [f"$-${_tex(cell[1:])}" if cell.startswith("-") else _tex(cell) for cell in cells]
    return " & ".join(texts) + r" \\"
