"""Position-to-position distillation: the loss compared with a loop, and a student that agrees with its teacher."""

import math

import pytest
import torch

from alibi_lab.lab.config import EvalConfig
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.data.tasks import recall_rows
from alibi_lab.lab.systems import pos2distill
from alibi_lab.lab.systems.pos2distill import ASKED, COLUMNS, Pos2Distill, divergences, trained_on, weights

ALPHABET = torch.arange(64, dtype=torch.uint8)


def texts_at(distances: tuple[int, ...]) -> list[torch.Tensor]:
    return [recall_rows(ALPHABET, 24, distance=distance, trials=2, seed=3) for distance in distances]


def test_the_divergence_equals_a_loop_over_answers(tiny_model) -> None:
    teacher, student, texts = tiny_model("alibi"), tiny_model("alibi", seed=1), texts_at((8, 12, 17))
    with torch.no_grad():
        found = divergences(teacher, student, texts, 1, labels=False)
        on_labels = divergences(teacher, student, texts, 1, labels=True)
        for at, rows in enumerate(texts):
            total, nats = 0.0, 0.0
            for row in range(2):
                wanted = teacher(texts[1][row : row + 1, :-1])[0].double().softmax(-1)
                given = student(rows[row : row + 1, :-1])[0].double().softmax(-1)
                for place in range(-ASKED, 0):
                    p, q = wanted[place].tolist(), given[place].tolist()
                    total += math.fsum(one * math.log(one / other) for one, other in zip(p, q, strict=True))
                    nats -= math.log(q[int(rows[row, place])])
            assert float(found[at]) == pytest.approx(total / (2 * ASKED), rel=1e-4)
            assert float(on_labels[at]) == pytest.approx(nats / (2 * ASKED), rel=1e-4)


def test_worse_places_weigh_more_and_the_favorable_one_is_an_anchor() -> None:
    found = weights(torch.tensor([math.log(3), 5.0, 0.0, math.log(2)]), favorable=1)
    assert found.tolist() == pytest.approx([1.5, 1.0, 0.5, 1.0])


def test_a_student_learns_its_teachers_answers_and_the_teacher_stays(tiny_model, monkeypatch) -> None:
    """Both train on the tested texts alone, because an untrained teacher's answers to others cannot be learned."""
    monkeypatch.setattr(
        pos2distill, "recall_rows", lambda *given, seed, **other: recall_rows(*given, seed=3, **{**other, "trials": 2})
    )
    teacher, texts = tiny_model("alibi"), texts_at((8, 17))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)  # so that answers depend on the place
    before = [parameter.clone() for parameter in teacher.parameters()]
    student = trained_on(teacher, ALPHABET, 24, 8, labels=False, steps=60)
    assert all(torch.equal(*pair) for pair in zip(before, teacher.parameters(), strict=True))
    with torch.no_grad():
        same, far = divergences(teacher, teacher, texts, 0, labels=False).tolist()
        _, learned = divergences(teacher, student, texts, 0, labels=False).tolist()
    assert same == pytest.approx(0, abs=1e-6)
    assert learned < 0.5 * far


def test_rows_are_by_length_and_distance_and_none_without_positions(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(trained_on, "__kwdefaults__", {**trained_on.__kwdefaults__, "steps": 1})
    config = EvalConfig(lengths=(16, 24), tokens=24, trials=2, batch_tokens=500)
    table = Pos2Distill.curves(tiny_model("learned"), Corpus(ALPHABET, ALPHABET, {}), config)["pos2distill"]
    assert list(table) == list(COLUMNS)
    assert table["distance"] == [8, 9, 8, 16, 17]
    assert [value is None for value in table["accuracy"]] == [False, False, True, True, True]
    assert table["tokens"][0] == 2 * ASKED
    assert table["favorable"][0] in (8, 9)
