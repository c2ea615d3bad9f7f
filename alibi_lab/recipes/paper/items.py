"""Figures 1 to 11 and tables 1 to 15: the question of each, and its cells.

The contents of the figures were checked against a transcript of arXiv:2108.12409v2. Rows that the paper only cites
(Transformer-XL, kNN-LM, ...) have no cells, because we did not run them. Staged training (tables 7 and 10), which the paper
cites, is run here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
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
        for tested in [web.validated_at(PAPER_METHODS[name], length)]
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


def _item(
    name: str,
    study: str,
    question: str,
    expected: str,
    cells: Callable[[Scale], Cells],
    answer: Callable[[Sequence[Cell], Evidence], Curves],
) -> Item:
    recipe = Recipe(
        name=name,
        question=question,
        paper=name.replace("-", " "),
        command=f"alibi run {name} --scale small",
        cost=_COST[study],
        expected=expected,
        runs=lambda scale: configs(cells(scale)),
        study=study,
    )
    return Item(recipe=recipe, cells=cells, answer=answer)


_COST = {
    "wikitext": "smoke: seconds; small: a minute per training on two cores, shared with the study's other items; paper: 8 GPUs",
    "books": "smoke: seconds; small: a minute per training on two cores, shared with the study's other items; paper: 8 GPUs",
    "web": "smoke: seconds; small: a minute per training on two cores, shared with the study's other items; paper: 128 GPUs",
    "speed": "smoke: seconds; small: ten seconds per measurement on two cores; paper: minutes on one GPU",
    "method": "nothing is trained",
}
_FOUR = tuple(PAPER_METHODS)
_ENDS = (512, 1024, 3072)

ITEMS: dict[str, Item] = {
    item.recipe.name: item
    for item in (
        _item(
            "figure-1", "wikitext", "Which of four position methods predict well beyond the length they were trained at?",
            "ALiBi stays level or improves far beyond L; sinusoidal and rotary get worse soon after L, T5 bias later",
            partial(_extrapolation, trained=(512, 1024)), answers.by_length,
        ),
        _item(
            "figure-2", "speed", "What do the four position methods cost in speed and memory?",
            "ALiBi costs the same as sinusoidal; the paper's rotary and T5 bias were slow partly due to their implementations",
            partial(_speed, names=_FOUR, lengths=_ENDS, labels="{name}, L = {length}"), answers.speeds,
        ),
        _item(
            "figure-3", "method", "What does ALiBi add to the scores of each head?",
            "a slope m times the distance, 0 at the query itself; m = 1/2 to 1/256 for eight heads",
            lambda scale: (), drawings.slopes,
        ),
        _item(
            "figure-4", "wikitext", "Does ALiBi trained on short inputs beat sinusoidal trained on long ones?",
            "ALiBi's perplexity falls as L_valid grows; trained at L = 512, it ends below sinusoidal at 3,072",
            partial(_varying, lengths=wikitext.TRAINED[3:], baselines={"Sinusoidal": wikitext.TRAINED[3:]}),
            answers.by_length,
        ),
        _item(
            "figure-5", "web", "In equal time, does a large ALiBi model trained at half the length keep up?",
            "the two curves of each panel stay close throughout",
            partial(_through_training, columns=False), answers.through_training,
        ),
        _item(
            "figure-6", "web", "How far beyond their trained length do the large models work?",
            "ALiBi is best near 2 L and rises slightly afterwards; sinusoidal rises immediately",
            partial(_web, trained=(512, 1024), beyond=True), answers.by_length,
        ),
        _item(
            "figure-7", "speed", "How much faster is training with shorter examples?",
            "both methods slow down equally as L grows",
            partial(_speed, names=("Sinusoidal", "ALiBi"), lengths=wikitext.TRAINED, labels="{name}"), answers.speeds,
        ),
        _item(
            "figure-8", "wikitext", "What does faster training on shorter inputs cost ALiBi in perplexity at 3,072 tokens?",
            "every ALiBi model with L = 512 or more is below the sinusoidal one, and all except L = 3072 train faster",
            _frontier, answers.frontier,
        ),
        _item(
            "figure-9", "books", "Do the slopes chosen on WikiText-103 work for books?",
            "as figure 4: ALiBi is below sinusoidal at every L",
            _books, answers.by_length,
        ),
        _item(
            "figure-10", "wikitext", "What context does each prediction see, with nonoverlapping and with sliding windows?",
            "two passes versus five; nearly all sliding predictions see a full window, so their loss is lower",
            _drawn_windows, drawings.windows,
        ),
        _item(
            "figure-11", "wikitext", "Does ALiBi benefit from longer inputs when no token is near the start of its window?",
            "no: with a sliding window of stride 1 it stays level, and sinusoidal still explodes",
            partial(_stride_1, names=("Sinusoidal", "ALiBi")), answers.by_length,
        ),
        _item(
            "table-1", "speed", "What are the exact speed and memory costs of the four position methods?",
            "as figure 2",
            partial(_speed, names=_FOUR, lengths=_ENDS, labels="{name}, L = {length}"), answers.speeds,
        ),
        *(
            _item(
                f"table-{number}", "wikitext", f"How well do models trained at L = {length} predict beyond it?",
                "as figure 1",
                partial(_extrapolation, trained=(length,)), answers.by_length,
            )
            for number, length in ((2, 512), (3, 1024), (4, 3072))
        ),
        _item(
            "table-5", "wikitext", "What is the perplexity of every pair of trained and tested length?",
            "as figure 4; at L = 64 and 128, sinusoidal is better at its trained length",
            partial(
                _varying, lengths=wikitext.TRAINED,
                baselines={"Sinusoidal": wikitext.TRAINED, "Rotary": _ENDS, "T5 Bias": _ENDS},
            ),
            answers.by_length,
        ),
        _item(
            "table-6", "wikitext", "Do the results hold on the test text, nonoverlapping?",
            "the same order as on the validation text: ALiBi at L = 3072 first",
            partial(_models, training=wikitext.training, way="nonoverlapping", names=_FOUR[:3], staged=False),
            answers.models,
        ),
        _item(
            "table-7", "wikitext", "Do the results hold on the test text with a sliding window?",
            "ALiBi at L = 3072 first; ALiBi at L = 512 loses its lead, because no token is near the start of its window",
            partial(_models, training=wikitext.training, way="sliding", names=_FOUR[:3], staged=True),
            answers.models,
        ),
        _item(
            "table-8", "books", "What is the perplexity of every pair of trained and tested length on books?",
            "as figure 9",
            _books, answers.by_length,
        ),
        _item(
            "table-9", "books", "Do the results on books hold on the test text, nonoverlapping?",
            "ALiBi at L = 3072 first, at L = 512 second",
            partial(_models, training=books.training, way="nonoverlapping", names=_FOUR[:1], staged=False),
            answers.models,
        ),
        _item(
            "table-10", "books", "Do the results on books hold on the test text with a sliding window?",
            "ALiBi at L = 3072 first; at L = 512 it is worse than the same model nonoverlapping",
            partial(_models, training=books.training, way="sliding", names=_FOUR[:1], staged=True),
            answers.models,
        ),
        _item(
            "table-11", "web", "After equal time, how good are the large models?",
            "the last points of figure 5: ALiBi is as good with less memory",
            partial(_through_training, columns=True), answers.equal_time,
        ),
        _item(
            "table-12", "web", "After equal updates, how good are the large models?",
            "equal at their trained length; only ALiBi works beyond it",
            partial(_web, trained=web.TRAINED, beyond=False), answers.equal_updates,
        ),
        *(
            _item(
                f"table-{number}", "wikitext", f"What is {name}'s perplexity with a sliding window of stride 1?",
                expected,
                partial(_stride_1, names=(name,)), answers.by_length,
            )
            for number, name, expected in (
                (13, "Sinusoidal", "it explodes beyond L"),
                (14, "T5 Bias", "it is level up to 2 L and rises slowly afterwards"),
                (15, "ALiBi", "it is level: longer inputs do not help"),
            )
        ),
    )
}  # fmt: skip

PAPER = Recipe(
    name="paper",
    question="Do all of the paper's results hold here?",
    paper="figures 1 to 11 and tables 1 to 15",
    command="alibi run paper --scale small",
    cost="smoke: under a minute; small: under an hour on two cores; paper: a cluster",
    expected="see each figure and table",
    runs=lambda scale: tuple(dict.fromkeys(run for item in ITEMS.values() for run in item.recipe.runs(scale))),
)
