"""The tasks against a copying oracle, and against models that cannot solve them; every row matches its description."""

import pytest
import torch
import torch.nn.functional as F
from copier import SURE, Copier

from alibi_lab.lab.config import ConfigError, DataConfig, EvalConfig
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.data.tasks import (
    DOCUMENT_TOKENS,
    KEY_DIGITS,
    SEGMENT,
    TaskError,
    passkey_rows,
    recall_distances,
    recall_rows,
    shortest_passkey,
    task_tokens,
)
from alibi_lab.lab.evaluation.losses import DEPTHS, passkey, recall

ALPHABET = torch.arange(0, 192, 3)
SENTENCE = b" The pass key is"


def test_a_passkey_is_one_sentence_at_its_depth_and_again_at_the_end():
    length = 200
    for depth in DEPTHS:
        rows, counts = passkey_rows(str.encode, length, depth=depth, trials=4)
        assert rows.shape == (4, length + 1)
        assert counts.tolist() == [2 * KEY_DIGITS] * 4
        for row in rows:
            text = bytes(row.tolist())
            question = text[-len(SENTENCE) - 2 * KEY_DIGITS :]
            assert question.startswith(SENTENCE)
            assert text.count(question) == 2
            room = length + 1 - 2 * len(question) - len(" .")
            assert text.index(question + b" .") == round(depth * room)
    keys = {bytes(row[-10:].tolist()) for row in passkey_rows(str.encode, length, depth=0, trials=16)[0]}
    assert len(keys) == 16


def test_the_shortest_passkey_has_no_filler():
    shortest = shortest_passkey(str.encode)
    text = bytes(passkey_rows(str.encode, shortest, depth=0.5, trials=1)[0][0].tolist())
    assert text == text[-26:] + b" ." + text[-26:]
    with pytest.raises(TaskError, match="no room in 52 tokens; pass lengths of 53 or more"):
        passkey_rows(str.encode, shortest - 1, depth=0.5, trials=1)


def test_digits_that_a_tokenizer_cannot_distinguish_are_refused():
    unknown = {word: number for number, word in enumerate(["The", "pass", "key", "is", ".", *"0123456"])}
    with pytest.raises(TaskError, match=r"the digits 7 and 8 alike \(\[99\]\)"):
        passkey_rows(lambda text: [unknown.get(word, 99) for word in text.split()], 100, depth=0.5, trials=1)


def test_digits_may_have_different_numbers_of_tokens():
    def encode(text):  # even digits are one token, odd ones two
        return [
            token
            for byte in text.encode()
            if byte != 32
            for token in ([byte] if not chr(byte).isdigit() or byte % 2 == 0 else [200, byte])
        ]

    rows, counts = passkey_rows(encode, 90, depth=0.5, trials=8)
    for row, count in zip(rows, counts, strict=True):
        odd = int((row[-count:] == 200).sum())
        assert count == KEY_DIGITS + odd
    curve = passkey(Copier(cue=12), encode, EvalConfig(lengths=(90,), trials=4))
    assert curve["accuracy"] == [1.0] * len(DEPTHS)


def test_recall_repeats_a_segment_that_occurs_nowhere_else():
    rows = recall_rows(ALPHABET, 50, distance=21, trials=6)
    assert rows.shape == (6, 51)
    assert torch.equal(rows[:, -8:], rows[:, -29:-21])
    for row in rows:
        assert set(row.tolist()) <= set(ALPHABET.tolist())
        assert all(int((row == token).sum()) == 2 for token in row[-8:])
    longer = recall_rows(ALPHABET, 80, distance=21, trials=6, longest=90)
    assert torch.equal(recall_rows(ALPHABET, 50, distance=21, trials=6, longest=90), longer[:, -51:])


def test_recall_asks_at_doubling_distances_and_at_the_farthest():
    assert recall_distances(200) == [8, 16, 32, 64, 128, 193]
    assert recall_distances(15) == [8]
    assert recall_distances(14) == []
    for distance in recall_distances(200):
        recall_rows(ALPHABET, 200, distance=distance, trials=1)
    for distance in (7, 194):
        with pytest.raises(TaskError, match=f"distance is {distance} but must be from 8 to 193 in 200"):
            recall_rows(ALPHABET, 200, distance=distance, trials=1)
    with pytest.raises(TaskError, match="has 31 different tokens but recall needs 32"):
        recall_rows(torch.arange(31), 200, distance=8, trials=1)


def test_a_copier_finds_every_number_and_every_segment():
    config = EvalConfig(lengths=(60, 100), batch_tokens=300, trials=3)
    keys = passkey(Copier(cue=10), str.encode, config)
    assert keys["length"] == [60] * 5 + [100] * 5
    assert keys["depth"] == [0, 0.25, 0.5, 0.75, 1] * 2
    assert keys["accuracy"] == [1.0] * 10
    assert keys["trials"] == [3] * 10
    repeats = recall(Copier(cue=1), ALPHABET, config)
    assert repeats["distance"] == [8, 16, 32, 53, 8, 16, 32, 64, 93]
    assert repeats["accuracy"] == [1.0] * 9
    assert repeats["tokens"] == [21] * 9
    sure = float(F.cross_entropy(torch.tensor([SURE] + [0.0] * 255), torch.tensor(0)))
    assert max(repeats["nats"] + keys["nats"]) == pytest.approx(sure, rel=1e-3)


def test_one_wrong_digit_is_a_wrong_number_but_only_one_wrong_token():
    class Misreads(Copier):
        def _next(self, seen):
            told = super()._next(seen)
            return told + 1 if bytes(seen[-len(SENTENCE) - 1 :]).startswith(SENTENCE + b" ") else told

    config = EvalConfig(lengths=(60,), batch_tokens=300, trials=3)
    assert passkey(Misreads(cue=10), str.encode, config)["accuracy"] == [0.0] * 5


@pytest.mark.parametrize(("task", "document_tokens"), [("recall", 64), ("recall", 61), ("passkey", 70)])
def test_a_tasks_text_is_documents_that_can_be_answered(task, document_tokens):
    text = task_tokens(task, 20 * document_tokens - 5, 0, document_tokens=document_tokens)
    assert (len(text), text.dtype) == (20 * document_tokens - 5, torch.uint8)
    assert torch.equal(text, task_tokens(task, len(text), 0, document_tokens=document_tokens))
    assert not torch.equal(text, task_tokens(task, len(text), 1, document_tokens=document_tokens))
    repeats = 0
    for document in text.split(document_tokens)[:-1]:
        if task == "passkey":
            whole = bytes(document.tolist())
            assert whole.count(whole[-26:]) == 2
        else:
            segment = document[document >= 32]
            repeats += len(segment) // SEGMENT
            assert len(segment.unique()) <= SEGMENT
            assert torch.equal(segment[:SEGMENT].repeat(len(segment) // SEGMENT + 1)[: len(segment)], segment)
    assert task == "passkey" or repeats > 2 * 19


def test_a_tasks_corpus_is_named_by_the_task_and_the_length_of_its_documents():
    corpus = load_corpus(DataConfig(corpus="task:recall:64"))
    assert (len(corpus.train), len(corpus.valid)) == (1 << 22, 1 << 17)
    assert corpus.facts["name"] == "task:recall:64"
    assert corpus.facts["valid_tokens"] == 1 << 17
    assert corpus.starts["train"][:3].tolist() == [0, 64, 128]
    assert DOCUMENT_TOKENS == 128
    for wrong in ("task:sort", "task:recall:0", "task:recall:"):
        with pytest.raises(ConfigError, match='pass "python-source"'):
            DataConfig(corpus=wrong)
    with pytest.raises(ConfigError, match=r"made of bytes; leave data\.tokenizer"):
        DataConfig(corpus="task:recall", tokenizer="bpe:512")
