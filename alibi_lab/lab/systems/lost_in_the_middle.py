"""Accuracy by the place of the evidence, and attention calibrated for places, of any trained model.

Lost in the Middle (Liu et al. 2023, arXiv:2307.03172) places the document with the answer among others that do not matter, and
reports accuracy by its place. Here the documents are the `DOCUMENTS` equal parts of a text of the recall task (`data/tasks.py`);
one has the segment that the end repeats, and the others are noise. Attn(k) is the mean weight of a token of document k for the
queries of the answer, averaged over layers and heads. Found in the Middle (Hsieh et al. 2024, arXiv:2406.16008) assumes

    Attn(document, k) = rel(document) + bias(k)

so a dummy document in each place measures the bias, and rel(document) = Attn(document, k) − Attn(dummy, k) ranks documents
without it. In each head of the second half of the layers, weights are then multiplied by one factor per document, so that
Attn(k) is proportional to softmax(rel / t) and all documents together keep their weight. A dummy is noise of another trial. The
paper has one query instead of seven, and t = 5·10⁻⁵ for prompts of about 3,000 tokens, where `TEMPERATURE` / length is as much.

    alibi eval CHECKPOINT --text a.txt --method alibi_lab.lab.systems.lost_in_the_middle:LostInTheMiddle
"""

import torch
from torch import Tensor, nn

from alibi_lab.lab.config import EvalConfig
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.data.tasks import ASKED, SEGMENT, recall_rows
from alibi_lab.lab.evaluation.losses import Rows, in_batches, table
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import Attention, Pass, PositionMethod, Wrapping
from alibi_lab.records import Curves

DOCUMENTS = 7
TEMPERATURE = 0.15
_LEAST = 1e-30  # a document of less weight has lost its digits in fp32 and stays unread
COLUMNS = ("document", "tokens", "accuracy", "calibrated_accuracy", "dummy_attention", "found", "calibrated_found")


class LostInTheMiddle(PositionMethod):
    """A test for models of any method; as a method to train with, it has no positions."""

    @classmethod
    def curves(cls, model: LanguageModel, corpus: Corpus, config: EvalConfig) -> Curves:
        """One row per length and place of the evidence, the first document first.

        accuracy             the share of the segment's seven tokens that are the most likely ones
        dummy_attention      Attn(dummy, k) times the length: 1 is the mean of a text
        found                the share of trials in which the evidence has the highest Attn
        calibrated_…         the same with calibrated attention

        Values are None for lengths without positions or room; calibrated ones and those of attention also for methods that read
        in segments, because no layer then sees all documents.

        Raises:
            TaskError: fewer than 32 different tokens in the training text.
        """
        alphabet = corpus.train.unique()

        def score(stretched: LanguageModel, length: int) -> Rows:
            edges = document_edges(length)
            texts = [_evidence_in(k, edges, alphabet, length, config) for k in range(DOCUMENTS)]
            measured = _measure(stretched, texts, edges, config.batch_tokens)
            return [(ASKED * config.trials, *values) for values in measured]

        places, least = range(1, DOCUMENTS + 1), (DOCUMENTS + 1) * SEGMENT - 1
        return {"lost_in_the_middle": table(model, config, COLUMNS, lambda length: places, score, least=least)}


def document_edges(length: int) -> Tensor:
    """The first token of each document, and the end of the last one, where the segment is repeated: [DOCUMENTS + 1]."""
    return torch.arange(DOCUMENTS + 1) * (length + 1 - SEGMENT) // DOCUMENTS


def _evidence_in(k: int, edges: Tensor, alphabet: Tensor, length: int, config: EvalConfig) -> Tensor:
    """Recall texts [trials, length + 1] with the segment in the middle of document k; the noise does not depend on k."""
    start = int(edges[k] + (edges[k + 1] - edges[k] - SEGMENT) // 2)
    return recall_rows(alphabet, length, distance=int(edges[-1]) - start, trials=config.trials)


def _measure(model: LanguageModel, texts: list[Tensor], edges: Tensor, batch_tokens: int) -> Rows:
    """The columns from "accuracy" on for each place of the evidence."""
    rows, trials = torch.cat(texts), len(texts[0])
    hits, attention = answers(model, rows, edges, batch_tokens)
    found: list[Tensor | None] = [hits, *[None] * 4]
    if attention is not None:
        dummy = torch.empty_like(attention)
        for k in range(DOCUMENTS):
            changed, place = rows.clone(), slice(int(edges[k]), int(edges[k + 1]))
            noise = texts[(k + 1) % DOCUMENTS][:, place].roll(1, 0)
            changed[:, place] = noise.repeat(DOCUMENTS, 1)
            seen = answers(model, changed, edges, batch_tokens)[1]
            assert seen is not None
            dummy[:, k] = seen[:, k]
        length = rows.shape[1] - 1
        rel = attention - dummy
        calibrated, _ = answers(model, rows, edges, batch_tokens, share=(rel * length / TEMPERATURE).softmax(-1))
        evidence = torch.arange(DOCUMENTS).repeat_interleave(trials)
        bias = dummy.mean(0).repeat_interleave(trials) * length
        found[1:] = [calibrated, bias, attention.argmax(-1) == evidence, rel.argmax(-1) == evidence]
    means = (None if column is None else column.double().view(DOCUMENTS, -1).mean(1).tolist() for column in found)
    return list(zip(*(column or [None] * DOCUMENTS for column in means), strict=True))


def answers(
    model: LanguageModel, rows: Tensor, edges: Tensor, batch_tokens: int, *, share: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Whether each token of the answer was the most likely one, [N, ASKED], and Attn, [N, DOCUMENTS] float64.

    Attn is None for methods that read in segments.

    Args:
        share: [N, DOCUMENTS], what Attn shall be proportional to.
    """
    method = model.position
    watch = Watched(method, edges.to(model.device)) if method.segment is None else None

    def read(some: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        if watch:
            watch.seen.clear()
            watch.share = None if share is None else share[which].to(model.device)
        hits = model(some[:, :-1])[:, -ASKED:].argmax(-1) == some[:, -ASKED:]
        return (hits, torch.stack(watch.seen).mean(0)) if watch else (hits,)

    try:
        model.position = watch or method
        hits, *seen = in_batches(model, rows, read, batch_tokens=batch_tokens)
    finally:
        model.position = method
    return hits, seen[0] if seen else None


class Watched(Wrapping):
    """Another method whose attention to documents is measured and, with `share`, redistributed.

    The weights of a document's tokens are summed by attending to values that are 1 in the document and 0 elsewhere, so every
    method works, whatever its attention computes, as long as that is linear in the values.
    """

    def __init__(self, method: PositionMethod, edges: Tensor) -> None:
        super().__init__(method)
        self.edges = nn.Buffer(edges)
        self.share: Tensor | None = None
        self.seen: list[Tensor] = []  # Attn of each layer, [B, DOCUMENTS] float64

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        attended = self.method.attend(q, k, v, at, default)
        keys = torch.arange(at.key_len, device=q.device)
        members = ((keys[:, None] >= self.edges[:-1]) & (keys[:, None] < self.edges[1:])).to(v.dtype)  # [S, documents]
        parts, mass = [], []
        for member in members.T[:, :, None]:
            ones = self.method.attend(q, k, member.expand_as(v).contiguous(), at, default)
            mass.append(ones[:, :, -ASKED:, :1].double())
            if self.share is not None:
                parts.append(self.method.attend(q, k, v * member, at, default)[:, :, -ASKED:])
        weight, sizes = torch.cat(mass, -1), self.edges.diff().double()  # [B, H, ASKED, documents]
        self.seen.append((weight / sizes).mean((1, 2)))
        if self.share is None or at.layer.index < self.config.num_layers // 2:
            return attended
        readable = weight > _LEAST
        target = torch.where(readable, self.share[:, None, None] * sizes, 0.0)
        target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.double).tiny)
        factors = torch.where(readable, target * weight.sum(-1, keepdim=True) / weight, 1.0)
        change = torch.einsum("bhtn,nbhtd->bhtd", factors - 1, torch.stack(parts).double())
        return torch.cat([attended[:, :, :-ASKED], attended[:, :, -ASKED:] + change.to(v.dtype)], 2)
