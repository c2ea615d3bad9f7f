"""Figures 1 to 11 and tables 1 to 15: the cells of each, and how it is computed; `questions.json` has its question.

The contents of the figures were checked against a transcript of arXiv:2108.12409v2. Rows that the paper only cites
(Transformer-XL, kNN-LM, ...) have no cells, because we did not run them. Staged training (tables 7 and 10), which the paper
cites, is run here.
"""

import dataclasses
import itertools
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from alibi_lab.lab.config import Recipe, RunConfig, Scale, Split
from alibi_lab.recipes.paper import answers, studies
from alibi_lab.recipes.paper.answers import Evidence
from alibi_lab.recipes.paper.cells import Cell, Curves, Item, Way, configs, scaled, tested
from alibi_lab.report.published import PAPER_METHODS

Cells = Iterator[Cell]
Training = Callable[..., RunConfig]  # `studies.wikitext` or `studies.books`


_STAGED = "Staged Training (Press et al., 2021)"
_AT_OWN = "L = L_valid"


def _extrapolation(scale: Scale, *, trained: tuple[int, ...]) -> Cells:
    """Figure 1 and tables 2–4."""
    for length in _trained(trained, scale):
        for name, method in PAPER_METHODS.items():
            twice = scale == "small" and length < studies.LONGEST
            seeds = 2 if twice else _seeds(studies.wikitext, name, length, scale)
            lengths = studies.extrapolation_lengths(length, scale)
            run = tested(studies.wikitext(method, length, scale), lengths, scale)
            yield from _cells(f"{name}, L = {length}", run, lengths, scale, seeds=seeds)


def _varying(
    scale: Scale, *, training: Training, lengths: tuple[int, ...], baselines: dict[str, tuple[int, ...]]
) -> Cells:
    """Figures 4 and 9 and tables 5 and 8: ALiBi at its trained length and all longer ones, others at their trained length."""
    lengths = _trained(lengths, scale)
    rows = [("ALiBi", f"L = {one}", one, [longer for longer in lengths if longer >= one]) for one in lengths]
    rows += [(name, _AT_OWN, one, [one]) for name, own in baselines.items() for one in _trained(own, scale)]
    for name, trained_at, length, longer in rows:
        # Also tested at the longest, so that all models score the same tokens.
        run = tested(training(PAPER_METHODS[name], length, scale), sorted({*longer, studies.LONGEST}), scale)
        yield from _cells(f"{name}, {trained_at}", run, longer, scale, seeds=_seeds(training, name, length, scale))


def _trained(lengths: Sequence[int], scale: Scale) -> tuple[int, ...]:
    """Those at which the scale trains."""
    return tuple(length for length in lengths if length in studies.trained_lengths(scale))


def _seeds(training: Training, name: str, length: int, scale: Scale) -> int:
    """At small, those of figure 1 and tables 2 and 3 have two instead."""
    several = training is studies.wikitext and scale == "medium"
    return studies.SEEDS.get(name, {}).get(str(length), 1) if several else 1


def _frontier(scale: Scale) -> Cells:
    """Figure 8, a cross-section of table 5."""
    for cell in _VARYING(scale, lengths=_ALL, baselines={"Sinusoidal": (studies.LONGEST,)}):
        if cell.paper_length == studies.LONGEST:
            yield dataclasses.replace(cell, label=cell.label.replace(_AT_OWN, f"L = {studies.LONGEST}"))


def _models(scale: Scale, *, training: Training, way: Way, names: tuple[str, ...], staged: bool) -> Cells:
    """Tables 6, 7, 9 and 10: L = 3072, and ALiBi with L = 512 as well, on the validation and test texts."""
    longest = studies.LONGEST
    rows = [(_STAGED, "Sinusoidal", longest)] if staged else []
    rows += [(f"{name}, L = {longest}", name, longest) for name in names]
    rows += [(f"ALiBi, L = {one}, L_valid = {longest}", "ALiBi", one) for one in (512, longest)]
    for label, name, length in rows:
        seeds = 1 if label == _STAGED else _seeds(training, name, length, scale)
        run = training(PAPER_METHODS[name], length, scale, staged=label == _STAGED)
        for split in typing.get_args(Split):
            config = tested(run, [longest], scale, stride=scaled(studies.STRIDE, scale), split=split)
            yield from _cells(label, config, [longest], scale, column=f"{split}_perplexity", way=way, seeds=seeds)


def _stride_1(scale: Scale, *, names: tuple[str, ...]) -> Cells:
    """Figure 11 and tables 13–15."""
    for name, length in itertools.product(names, studies.FEW):
        longer = [one for one in (512, 1024, 1536, 2048, 3072) if one >= length]
        run = studies.wikitext(PAPER_METHODS[name], length, scale)
        tokens = studies.STRIDE_1_TOKENS.get(scale, run.eval.tokens)
        run = tested(run, sorted({*longer, studies.LONGEST}), scale, tokens=tokens, stride=1)
        seeds = _seeds(studies.wikitext, name, length, scale)
        yield from _cells(f"{name}, L = {length}", run, longer, scale, way="sliding", seeds=seeds)


def _through_training(scale: Scale, *, column: str = "perplexity") -> Cells:
    """Figure 5 and table 11: pairs with the same L_valid, where ALiBi is trained at half of it."""
    for name, length in (("Sinusoidal", 1024), ("ALiBi", 512), ("Sinusoidal", 2048), ("ALiBi", 1024)):
        method = PAPER_METHODS[name]
        lengths = [studies.FIGURE_5[method, length]]
        yield from _cells(f"{name}, L = {length}", studies.web(method, length, scale), lengths, scale, column=column)


def _web(scale: Scale, *, trained: tuple[int, ...], beyond: bool) -> Cells:
    """Figure 6 (`beyond`: up to 10,000 tokens) and table 12 (one column per length)."""
    for length, name in itertools.product(trained, ("Sinusoidal", "ALiBi")):
        run = studies.web(PAPER_METHODS[name], length, scale)
        lengths = (
            studies.web_lengths(length, scale) if beyond else [one for one in studies.WEB_LENGTHS if one >= length]
        )
        column = "perplexity" if beyond else "perplexity_{}"
        yield from _cells(f"{name}, L = {length}", tested(run, lengths, scale), lengths, scale, column=column)


def _speed(scale: Scale, *, names: tuple[str, ...], lengths: tuple[int, ...], labels: str) -> Cells:
    """Figures 2 and 7 and table 1."""
    for name, length in itertools.product(names, lengths):
        run = studies.speed(PAPER_METHODS[name], length, scale)
        yield from _cells(labels.format(name=name, length=length), run, [length], scale)


def _drawn_windows(scale: Scale) -> Cells:
    """Figure 10: the paper's eight words, with a trained model's losses at these context lengths."""
    run = dataclasses.replace(studies.wikitext("alibi", 512, scale), eval=answers.AS_DRAWN)
    ways: dict[str, Way] = {"Nonoverlapping": "nonoverlapping", "Sliding window": "sliding"}
    for label, way in ways.items():
        yield Cell(label=label, config=run, paper_length=answers.WINDOW, length=answers.WINDOW, way=way)


def _cells(
    label: str, config: RunConfig, lengths: Sequence[int], scale: Scale, column: str = "perplexity", **options: Any
) -> Cells:
    """The cells of a run that is tested at these lengths of the paper; the column may contain the length."""
    for one in lengths:
        length = scaled(one, scale)
        yield Cell(label=label, config=config, paper_length=one, length=length, column=column.format(one), **options)


def _item(
    name: str, cells: Callable[[Scale], Iterable[Cell]], answer: Callable[[Sequence[Cell], Evidence], Curves]
) -> Item:
    texts = _QUESTIONS[name]
    recipe = Recipe(
        name=name,
        paper=name.replace("-", " "),
        command=f"alibi run {name} --scale small",
        cost=studies.COSTS[texts["study"]],
        runs=lambda scale: configs(tuple(cells(scale))),
        scales=typing.get_args(Scale) if name in _ON_A_GPU else Recipe.scales,
        **texts,
    )
    return Item(recipe=recipe, cells=lambda scale: tuple(cells(scale)), answer=answer)


_QUESTIONS = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
_ON_A_GPU = ("figure-1", "table-2")
_FOUR = tuple(PAPER_METHODS)
_ALL = studies.LENGTHS
_SPEEDS = partial(_speed, names=_FOUR, lengths=studies.FEW, labels="{name}, L = {length}")
_BASELINES = {"Sinusoidal": _ALL, "Rotary": studies.FEW, "T5 Bias": studies.FEW}
_VARYING = partial(_varying, training=studies.wikitext)
_BOOKS = partial(_varying, training=studies.books, lengths=studies.FEW, baselines={"Sinusoidal": studies.FEW})
_ON_WIKITEXT = partial(_models, training=studies.wikitext, names=_FOUR[:3])
_ON_BOOKS = partial(_models, training=studies.books, names=_FOUR[:1])
_NONOVERLAPPING, _SLIDING = {"way": "nonoverlapping", "staged": False}, {"way": "sliding", "staged": True}

ITEMS: dict[str, Item] = {
    name: _item(name, cells, answer)
    for name, cells, answer in (
        ("figure-1", partial(_extrapolation, trained=(512, 1024)), answers.by_length),
        ("figure-2", _SPEEDS, answers.speeds),
        ("figure-3", lambda scale: (), answers.slopes),
        ("figure-4", partial(_VARYING, lengths=_ALL[3:], baselines={"Sinusoidal": _ALL[3:]}), answers.by_length),
        ("figure-5", _through_training, answers.through_training),
        ("figure-6", partial(_web, trained=(512, 1024), beyond=True), answers.by_length),
        ("figure-7", partial(_speed, names=("Sinusoidal", "ALiBi"), lengths=_ALL, labels="{name}"), answers.speeds),
        ("figure-8", _frontier, answers.frontier),
        ("figure-9", _BOOKS, answers.by_length),
        ("figure-10", _drawn_windows, answers.windows),
        ("figure-11", partial(_stride_1, names=("Sinusoidal", "ALiBi")), answers.by_length),
        ("table-1", _SPEEDS, answers.speeds),
        ("table-2", partial(_extrapolation, trained=(512,)), answers.by_length),
        ("table-3", partial(_extrapolation, trained=(1024,)), answers.by_length),
        ("table-4", partial(_extrapolation, trained=(3072,)), answers.by_length),
        ("table-5", partial(_VARYING, lengths=_ALL, baselines=_BASELINES), answers.by_length),
        ("table-6", partial(_ON_WIKITEXT, **_NONOVERLAPPING), answers.models),
        ("table-7", partial(_ON_WIKITEXT, **_SLIDING), answers.models),
        ("table-8", _BOOKS, answers.by_length),
        ("table-9", partial(_ON_BOOKS, **_NONOVERLAPPING), answers.models),
        ("table-10", partial(_ON_BOOKS, **_SLIDING), answers.models),
        ("table-11", partial(_through_training, column="perplexity_{}"), answers.equal_time),
        ("table-12", partial(_web, trained=studies.WEB_LENGTHS, beyond=False), answers.equal_updates),
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
