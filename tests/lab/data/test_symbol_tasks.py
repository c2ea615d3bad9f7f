"""Documents of symbols, read token by token with the rules: every answer follows from the earlier tokens."""

import typing

import pytest
import torch
from copier import Copier

from alibi_lab.lab.config import EvalConfig, SymbolTask
from alibi_lab.lab.data.tasks import CHANCE, TaskError, shortest, symbol_documents
from alibi_lab.lab.evaluation.losses import symbols

TASKS = typing.get_args(SymbolTask)
MARK, ASK, SEPARATOR = 30, 31, 63
WRITE, READ, IGNORE = 2, 3, 4


def made(task, length, *, varied=False, count=6, seed=3):
    return symbol_documents(task, count, length, torch.Generator().manual_seed(seed), varied=varied)


def answered(task, seen):
    """The next token by the rules of the task, or None if any token may follow."""
    if task == "mqar":
        return seen[seen.index(seen[-1]) + 1] if 32 <= seen[-1] < 48 and seen.count(seen[-1]) > 1 else None
    if task == "needles":
        asks = len(seen) > 1 and seen[-2] == ASK
        return next(seen[at + 2] for at in range(len(seen)) if seen[at : at + 2] == [MARK, seen[-1]]) if asks else None
    if task == "copy":
        if SEPARATOR not in seen[:-1]:
            return None
        last = len(seen) - 1 - seen[::-1].index(SEPARATOR)
        earlier = [at for at in range(last) if seen[at] == SEPARATOR]
        before = earlier[-1] if earlier else None
        place = len(seen) - last
        return None if before is None or before + place >= last else seen[before + place]
    start = 0 if seen[0] == WRITE else 1  # an odd document has one token before its first pair
    pairs = [(seen[at], seen[at + 1]) for at in range(start, len(seen) - 1, 2)]
    return [bit for instruction, bit in pairs if instruction == WRITE][-1] if seen[-1] == READ and pairs else None


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("length", [32, 47, 64, 200])
@pytest.mark.parametrize("task", TASKS)
def test_every_answer_follows_from_what_came_before(task, length, varied):
    tokens, answers = made(task, length, varied=varied)
    assert tokens.shape == answers.shape == (6, length)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 64
    assert bool(answers.any(1).all())
    for document, asked in zip(tokens.tolist(), answers.tolist(), strict=True):
        for at in range(1, length):
            if asked[at]:
                assert answered(task, document[:at]) == document[at], (document, at)


def test_tested_documents_ask_from_as_far_as_they_can():
    tokens, answers = made("mqar", 200)
    assert answers.nonzero()[:, 1].min() == 200 - 15
    assert bool((tokens[:, 0:16:2] >= 32).all())
    tokens, answers = made("copy", 200)
    assert torch.equal(tokens[:, 100:], tokens[:, :100])
    assert answers.sum(1).tolist() == [99] * 6
    tokens, _ = made("flip-flop", 4096, count=60)
    assert 100 < int((tokens[:, ::2] == WRITE).sum()) < 60 * 7  # 3.2 and the first, however long


def test_trained_documents_ask_from_near_and_far():
    tokens, answers = made("mqar", 64, varied=True, count=200)
    firsts = answers.int().argmax(1)
    assert int(firsts.min()) <= 19
    assert int(firsts.max()) >= 47
    _, answers = made("needles", 64, varied=True, count=200)
    assert set(answers.sum(1).tolist()) == set(range(4, 18))  # from one question per needle to questions only
    assert bool((made("needles", 64)[1].sum(1) == 4).all())
    tokens, _ = made("copy", 64, varied=True, count=200)
    gaps = {len(document) - 1 - document[::-1].index(SEPARATOR) for document in tokens.tolist()}
    assert min(gaps) <= 34
    assert max(gaps) >= 58


@pytest.mark.parametrize("task", TASKS)
def test_a_document_without_room_is_refused(task):
    made(task, shortest(task))
    with pytest.raises(TaskError, match=f"{task} has no room in {shortest(task) - 1} tokens; pass {shortest(task)}"):
        made(task, shortest(task) - 1)


def test_the_rules_give_every_answer_and_a_short_context_does_not():
    config = EvalConfig(lengths=(16, 40, 80), batch_tokens=500, trials=3)
    alphabet = torch.arange(64)
    curve = symbols(Copier(cue=1), "mqar", alphabet, config)["mqar"]
    assert curve["length"] == [16, 40, 80]
    assert curve["accuracy"] == curve["whole"] == [None, 1.0, 1.0]
    assert curve["answers"] == [None, 24, 24]
    near, parts = symbols(Copier(cue=1, sight=40), "mqar", alphabet, config).values()
    assert near["accuracy"][1] == 1.0
    assert near["accuracy"][2] == near["whole"][2] == 0.0
    assert parts["length"] == [40, 40, 40, 80, 80, 80]
    assert parts["part"] == [0, 1, 2, 0, 1, 2]
    assert parts["answers"] == [8] * 6
    assert parts["accuracy"] == [1.0] * 3 + [0.0] * 3
    copied = symbols(Copier(cue=6), "copy", alphabet, EvalConfig(lengths=(40,), trials=3))["copy"]
    assert 0.5 < copied["accuracy"][0] < 1.0
    assert copied["whole"] == [0.0]  # a cue of six is not there yet at the beginning


def test_chance_is_what_a_guess_gets():
    generator = torch.Generator().manual_seed(0)
    guesses = {"mqar": (48, 64), "needles": (48, 64), "copy": (0, 63), "flip-flop": (0, 2)}
    assert guesses.keys() == CHANCE.keys()
    for task, (low, high) in guesses.items():
        tokens, answers = made(task, 64, count=400)
        guessed = torch.randint(low, high, tokens.shape, generator=generator)
        assert float((guessed == tokens)[answers].double().mean()) == pytest.approx(CHANCE[task], rel=0.35)


def test_the_tasks_stand_for_no_other_text(tiny_model):
    with pytest.raises(TaskError, match=r"mqar has its own 64 tokens; test it on data\.corpus=task:mqar"):
        symbols(tiny_model("alibi"), "mqar", torch.arange(65), EvalConfig(lengths=(40,)))
