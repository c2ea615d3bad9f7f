"""Position-to-position distillation of any trained model, on the recall task.

Pos2Distill (Wang et al. 2025, arXiv:2508.15709) uses position bias against itself: a model answers best when the evidence stands
in its favorable place, so these answers teach the same model to answer when it stands elsewhere. Here (their variant for
retrieval, R1) the evidence is the segment of a recall text (`data/tasks.py`) that the end repeats, and a place is its distance
from there. With T the model as trained at the favorable distance f, and S the student, which starts as the same model,

    loss = mean over the distances d of w_d · KL(T at f ‖ S at d),    w = softmax of these KL times their number, w_f = 1

over the segment's seven tokens. So worse places count more, and the favorable one is an anchor. f is the distance with the lowest
loss. The paper distills language models with billions of weights. The same training on the segment itself, "labels", shows
whether the teacher's answers matter.

    alibi eval CHECKPOINT --text a.txt --lengths 256 --method alibi_lab.lab.systems.pos2distill:Pos2Distill
"""

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_lab.lab.config import EvalConfig
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.data.tasks import ASKED, recall_distances, recall_rows
from alibi_lab.lab.evaluation.losses import answers, columns, has_positions
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import PositionMethod
from alibi_lab.records import Curves, Json

STEPS, TEXTS, LEARNING_RATE = 200, 8, 5e-4  # TEXTS per distance and step
COLUMNS = ("length", "distance", "favorable", "tokens", "accuracy", "distilled_accuracy", "labels_accuracy")


class Pos2Distill(PositionMethod):
    """A test for models of any method; as a method to train with, it has no positions."""

    @classmethod
    def curves(cls, model: LanguageModel, corpus: Corpus, config: EvalConfig) -> Curves:
        """One row per length and distance: the share of right tokens before, after distillation, and after training on labels.

        Values are None for lengths without positions.

        Raises:
            TaskError: fewer than 32 different tokens in the training text.
        """
        rows: list[tuple[Json, ...]] = []
        for length in config.lengths:
            distances, alphabet = recall_distances(length), corpus.train.unique()
            if not has_positions(model, length):
                rows += [(length, distance, *[None] * (len(COLUMNS) - 2)) for distance in distances]
                continue
            teacher = model.stretched(config.stretch, length)
            tests = {d: recall_rows(alphabet, length, distance=d, trials=config.trials) for d in distances}
            nats, before = _scores(teacher, tests, config.batch_tokens)
            favorable = min(nats, key=nats.__getitem__)
            students = (trained_on(teacher, alphabet, length, favorable, labels=labels) for labels in (False, True))
            after = [_scores(student, tests, config.batch_tokens)[1] for student in students]
            tokens = ASKED * config.trials
            rows += [(length, d, favorable, tokens, *(hits[d] for hits in (before, *after))) for d in distances]
        return {"pos2distill": columns(COLUMNS, rows)}


def trained_on(
    teacher: LanguageModel, alphabet: Tensor, length: int, favorable: int, *, labels: bool, steps: int = STEPS
) -> LanguageModel:
    """A copy of the model, trained to answer at every distance as it does at the favorable one, or with the true tokens."""
    student, distances = copy.deepcopy(teacher), recall_distances(length)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    teacher.eval()
    student.eval()  # without dropout
    for step in range(steps):
        # With equal seeds only the place of the segment differs. Tests have the seed 0.
        texts = [recall_rows(alphabet, length, distance=d, trials=TEXTS, seed=1 + step) for d in distances]
        divergence = divergences(teacher, student, texts, distances.index(favorable), labels=labels)
        loss = (weights(divergence.detach(), distances.index(favorable)) * divergence).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student


def divergences(
    teacher: LanguageModel, student: LanguageModel, texts: Sequence[Tensor], favorable: int, *, labels: bool
) -> Tensor:
    """The student's mean KL to the teacher's answers to the favorable texts, or its loss on the labels, per distance."""
    rows = torch.cat(list(texts)).to(student.device)
    # [distances, TEXTS, ASKED, V]
    found = student(rows[:, :-1])[:, -ASKED:].log_softmax(-1).unflatten(0, (len(texts), -1))
    if labels:
        asked = rows[:, -ASKED:].unflatten(0, (len(texts), -1))
        return -found.gather(-1, asked[..., None]).mean((1, 2, 3))
    with torch.no_grad():
        wanted = teacher(texts[favorable].to(teacher.device)[:, :-1])[:, -ASKED:].log_softmax(-1)
    divergence = F.kl_div(found, wanted.expand_as(found), reduction="none", log_target=True)
    return divergence.sum(-1).mean((1, 2))


def weights(divergence: Tensor, favorable: int) -> Tensor:
    """The weight of each distance: the softmax of its divergence among the others times their number; 1 for the favorable one."""
    others = torch.arange(len(divergence)) != favorable
    found = torch.ones_like(divergence)
    found[others] = divergence[others].softmax(0) * others.sum()
    return found


def _scores(
    model: LanguageModel, tests: Mapping[int, Tensor], batch_tokens: int
) -> tuple[dict[int, float], dict[int, float]]:
    """By distance: the mean loss in nats, and the share of right tokens."""
    found = {d: answers(model, rows, scored=ASKED, batch_tokens=batch_tokens) for d, rows in tests.items()}
    nats = {d: float(losses.double().mean()) for d, (losses, _) in found.items()}
    return nats, {d: float(hits.double().mean()) for d, (_, hits) in found.items()}
