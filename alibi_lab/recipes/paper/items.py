"""Figures 1 to 11 and tables 1 to 15: the cells of each, and how it is computed; `questions.json` has its question.

The contents of the figures were checked against a transcript of arXiv:2108.12409v2. Rows that the paper only cites
(Transformer-XL, kNN-LM, ...) have no cells, because we did not run them. Staged training (tables 7 and 10), which the paper
cites, is run here.
"""

import dataclasses
import json
import typing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from alibi_lab.lab.config import Method, Recipe, RunConfig, Scale
from alibi_lab.recipes.paper import answers, books, drawings, speed, web, wikitext
from alibi_lab.recipes.paper.cells import Cell, Curves, Item, Way, configs, scaled
from alibi_lab.recipes.paper.evidence import Evidence
from alibi_lab.report.published import PAPER_METHODS

Cells = tuple[Cell, ...]


class Training(Protocol):
    """`wikitext.training` or `books.training`."""

    def __call__(self, method: Method, paper_length: int, scale: Scale, *, staged: bool = False) -> RunConfig: ...


_STAGED = "Staged Training (Press et al., 2021)"
# Of trainings with more than one; at small, those of figure 1 and tables 2 and 3 have two.
_SEEDS_AT_MEDIUM: dict[Method, dict[int, int]] = {
    "sinusoidal": {512: 3, 1024: 2, 3072: 2},
    "rotary": {512: 2, 1024: 2},
    "t5": {512: 2, 3072: 2},
    "alibi": {512: 3, 1024: 2, 3072: 2},
}
_AT_OWN = "L = L_valid"


def _extrapolation(scale: Scale, *, trained: tuple[int, ...]) -> Cells:
    """Figure 1 and tables 2–4."""
    return tuple(
        _cell(f"{name}, L = {length}", config, tested, scale, seeds=seeds)
        for length in trained
        if length in wikitext.trained_lengths(scale)
        for name, method in PAPER_METHODS.items()
        for seeds in [2 if scale == "small" and length < wikitext.LONGEST else _seeds(method, length, scale)]
        for config in [wikitext.tested_beyond(wikitext.training(method, length, scale), length, scale)]
        for tested in wikitext.extrapolation_lengths(length, scale)
    )


def _varying(scale: Scale, *, lengths: tuple[int, ...], baselines: dict[str, tuple[int, ...]]) -> Cells:
    """Figure 4 and table 5: ALiBi at its trained length and all longer ones, the others at their trained length."""
    trained = wikitext.trained_lengths(scale)
    lengths = tuple(length for length in lengths if length in trained)
    pairs = [(length, tested) for length in lengths for tested in lengths if tested >= length]
    return (
        *(_varied("alibi", length, tested, f"ALiBi, L = {length}", scale) for length, tested in pairs),
        *(
            _varied(PAPER_METHODS[name], own, own, f"{name}, {_AT_OWN}", scale)
            for name, own_lengths in baselines.items()
            for own in own_lengths
            if own in trained
        ),
    )


def _varied(method: Method, length: int, tested: int, label: str, scale: Scale) -> Cell:
    longer = tuple(one for one in wikitext.trained_lengths(scale) if one >= length) if method == "alibi" else (length,)
    config = wikitext.tested_to_longest(wikitext.training(method, length, scale), scale, *longer)
    return _cell(label, config, tested, scale, seeds=_seeds(method, length, scale))


def _seeds(method: Method, length: int, scale: Scale) -> int:
    """Of the WikiText-103 models, except at small those of figure 1."""
    return _SEEDS_AT_MEDIUM.get(method, {}).get(length, 1) if scale == "medium" else 1


def _frontier(scale: Scale) -> Cells:
    """Figure 8, a cross-section of table 5."""
    longest = wikitext.LONGEST
    rows = [("ALiBi", length) for length in wikitext.trained_lengths(scale)] + [("Sinusoidal", longest)]
    return tuple(_varied(PAPER_METHODS[name], length, longest, f"{name}, L = {length}", scale) for name, length in rows)


def _models(scale: Scale, *, training: Training, way: Way, names: tuple[str, ...], staged: bool) -> Cells:
    """Tables 6, 7, 9 and 10: L = 3072, and ALiBi with L = 512 as well, on the validation and test texts."""
    longest = wikitext.LONGEST
    rows: list[tuple[str, Method, int]] = [(f"{name}, L = {longest}", PAPER_METHODS[name], longest) for name in names]
    rows += [(f"ALiBi, L = {one}, L_valid = {longest}", "alibi", one) for one in (512, longest)]
    if staged:
        rows.insert(0, (_STAGED, "sinusoidal", longest))
    return tuple(
        _cell(label, config, longest, scale, column=f"{split}_perplexity", way=way, seeds=seeds)
        for label, method, length in rows
        for once in [label == _STAGED or training is books.training]
        for seeds in [1 if once else _seeds(method, length, scale)]
        for run in [training(method, length, scale, staged=label == _STAGED)]
        for split in ("valid", "test")
        for config in [wikitext.tested_with_stride(run, scale, split)]
    )


def _books(scale: Scale) -> Cells:
    """Figure 9 and table 8."""
    found = []
    for name, label in (("ALiBi", "ALiBi, L = {}"), ("Sinusoidal", f"Sinusoidal, {_AT_OWN}")):
        for length in books.TRAINED:
            tested = tuple(one for one in books.TRAINED if one >= length) if name == "ALiBi" else (length,)
            run = books.training(PAPER_METHODS[name], length, scale)
            config = wikitext.tested_to_longest(run, scale, *tested)
            found += [_cell(label.format(length), config, one, scale) for one in tested]
    return tuple(found)


def _stride_1(scale: Scale, *, names: tuple[str, ...]) -> Cells:
    """Figure 11 and tables 13–15."""
    lengths = (512, 1024, 1536, 2048, 3072)
    return tuple(
        _cell(f"{name}, L = {one}", config, at, scale, way="sliding", seeds=_seeds(PAPER_METHODS[name], one, scale))
        for name in names
        for one in (512, 1024, 3072)
        for run in [wikitext.training(PAPER_METHODS[name], one, scale)]
        for tested in [tuple(length for length in lengths if length >= one)]
        for config in [wikitext.tested_with_stride_1(run, scale, *tested)]
        for at in tested
    )


def _through_training(scale: Scale, *, columns: bool) -> Cells:
    """Figure 5 and table 11: pairs with the same L_valid, where ALiBi is trained at half of it."""
    return tuple(
        _cell(
            f"{name}, L = {length}", config, tested, scale, column=f"perplexity_{tested}" if columns else "perplexity"
        )
        for name, length in (("Sinusoidal", 1024), ("ALiBi", 512), ("Sinusoidal", 2048), ("ALiBi", 1024))
        for config in [web.training(PAPER_METHODS[name], length, scale)]
        for tested in [web.FIGURE_5[PAPER_METHODS[name], length]]
    )


def _web(scale: Scale, *, trained: tuple[int, ...], beyond: bool) -> Cells:
    """Figure 6 (`beyond`: up to 10,000 tokens) and table 12 (one column per length)."""
    return tuple(
        _cell(f"{name}, L = {length}", config, one, scale, column="perplexity" if beyond else f"perplexity_{one}")
        for length in trained
        for name in ("Sinusoidal", "ALiBi")
        for run in [web.training(PAPER_METHODS[name], length, scale)]
        for config in [web.tested_beyond(run, length, scale) if beyond else run]
        for one in (web.extrapolation_lengths(length, scale) if beyond else web.TRAINED)
        if one >= length
    )


def _speed(scale: Scale, *, names: tuple[str, ...], lengths: tuple[int, ...], labels: str) -> Cells:
    """Figures 2 and 7 and table 1."""
    return tuple(
        _cell(labels.format(name=name, length=length), speed.run(PAPER_METHODS[name], length, scale), length, scale)
        for name in names
        for length in lengths
    )


def _drawn_windows(scale: Scale) -> Cells:
    """Figure 10: the paper's eight words, with a trained model's losses at these context lengths."""
    run = dataclasses.replace(wikitext.training("alibi", 512, scale), eval=drawings.AS_DRAWN)
    ways: dict[str, Way] = {"Nonoverlapping": "nonoverlapping", "Sliding window": "sliding"}
    return tuple(
        Cell(label=label, config=run, paper_length=drawings.WINDOW, length=drawings.WINDOW, way=way)
        for label, way in ways.items()
    )


def _cell(label: str, config: RunConfig, tested: int, scale: Scale, **options: Any) -> Cell:
    """A cell tested at one of the paper's lengths."""
    return Cell(label=label, config=config, paper_length=tested, length=scaled(tested, scale), **options)


def _item(name: str, cells: Callable[[Scale], Cells], answer: Callable[[Sequence[Cell], Evidence], Curves]) -> Item:
    texts = _QUESTIONS[name]
    recipe = Recipe(
        name=name,
        paper=name.replace("-", " "),
        command=f"alibi run {name} --scale small",
        cost=_COST[texts["study"]],
        runs=lambda scale: configs(cells(scale)),
        scales=typing.get_args(Scale) if name in _ON_A_GPU else Recipe.scales,
        **texts,
    )
    return Item(recipe=recipe, cells=cells, answer=answer)


_QUESTIONS = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
_SHARED = (
    "smoke: seconds; small: a minute per training on two cores, shared with the study's other items; paper: {} GPUs"
)
_ON_A_GPU = ("figure-1", "table-2")
_COST = {
    "wikitext": _SHARED.format(8),
    "books": _SHARED.format(8),
    "web": _SHARED.format(128),
    "speed": "smoke: seconds; small: ten seconds per measurement on two cores; paper: minutes on one GPU",
    "method": "nothing is trained",
}
_FOUR = tuple(PAPER_METHODS)
_ENDS = (512, 1024, 3072)
_ALL = wikitext.TRAINED
_SPEEDS = partial(_speed, names=_FOUR, lengths=_ENDS, labels="{name}, L = {length}")
_BASELINES = {"Sinusoidal": _ALL, "Rotary": _ENDS, "T5 Bias": _ENDS}
_ON_WIKITEXT = partial(_models, training=wikitext.training, names=_FOUR[:3])
_ON_BOOKS = partial(_models, training=books.training, names=_FOUR[:1])
_NONOVERLAPPING, _SLIDING = {"way": "nonoverlapping", "staged": False}, {"way": "sliding", "staged": True}

ITEMS: dict[str, Item] = {
    name: _item(name, cells, answer)
    for name, cells, answer in (
        ("figure-1", partial(_extrapolation, trained=(512, 1024)), answers.by_length),
        ("figure-2", _SPEEDS, answers.speeds),
        ("figure-3", lambda scale: (), drawings.slopes),
        ("figure-4", partial(_varying, lengths=_ALL[3:], baselines={"Sinusoidal": _ALL[3:]}), answers.by_length),
        ("figure-5", partial(_through_training, columns=False), answers.through_training),
        ("figure-6", partial(_web, trained=(512, 1024), beyond=True), answers.by_length),
        ("figure-7", partial(_speed, names=("Sinusoidal", "ALiBi"), lengths=_ALL, labels="{name}"), answers.speeds),
        ("figure-8", _frontier, answers.frontier),
        ("figure-9", _books, answers.by_length),
        ("figure-10", _drawn_windows, drawings.windows),
        ("figure-11", partial(_stride_1, names=("Sinusoidal", "ALiBi")), answers.by_length),
        ("table-1", _SPEEDS, answers.speeds),
        ("table-2", partial(_extrapolation, trained=(512,)), answers.by_length),
        ("table-3", partial(_extrapolation, trained=(1024,)), answers.by_length),
        ("table-4", partial(_extrapolation, trained=(3072,)), answers.by_length),
        ("table-5", partial(_varying, lengths=_ALL, baselines=_BASELINES), answers.by_length),
        ("table-6", partial(_ON_WIKITEXT, **_NONOVERLAPPING), answers.models),
        ("table-7", partial(_ON_WIKITEXT, **_SLIDING), answers.models),
        ("table-8", _books, answers.by_length),
        ("table-9", partial(_ON_BOOKS, **_NONOVERLAPPING), answers.models),
        ("table-10", partial(_ON_BOOKS, **_SLIDING), answers.models),
        ("table-11", partial(_through_training, columns=True), answers.equal_time),
        ("table-12", partial(_web, trained=web.TRAINED, beyond=False), answers.equal_updates),
        ("table-13", partial(_stride_1, names=("Sinusoidal",)), answers.by_length),
        ("table-14", partial(_stride_1, names=("T5 Bias",)), answers.by_length),
        ("table-15", partial(_stride_1, names=("ALiBi",)), answers.by_length),
    )
}

PAPER = Recipe(
    name="paper",
    question="Do all of the paper's results hold here?",
    paper="figures 1 to 11 and tables 1 to 15",
    command="alibi run paper --scale small",
    cost="smoke: under a minute; small: under an hour on two cores; paper: a cluster",
    expected="see each figure and table",
    runs=lambda scale: tuple(dict.fromkeys(run for item in ITEMS.values() for run in item.recipe.runs(scale))),
)
