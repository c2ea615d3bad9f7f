"""kNN-LM on top of any trained model (Khandelwal et al. 2020, arXiv:1911.00172).

The datastore has one entry per token of the training text: the key f(c) of the context c before the token, and the token. f(c) is
the normalized input of the last feed-forward layer at the last token of c, the paper's best choice. With N the k entries nearest
to the context x of the next token y, and d the squared Euclidean distance,

    p_kNN(y | x) = Σ_{(key, token) ∈ N, token = y} exp(−d(key, f(x))) / Σ_{(key, ·) ∈ N} exp(−d(key, f(x)))
    p(y | x) = λ·p_kNN(y | x) + (1 − λ)·p_LM(y | x)

The search is exact. The paper has k = 1,024 and λ = 1/4, chosen on its validation text. Here k and λ are chosen on the first half
of the scored tokens, and the second half is reported. All contexts have L/2 to L tokens, with L the trained length.

    alibi eval CHECKPOINT --text a.txt --method alibi_lab.lab.systems.knn_lm:KnnLM
"""

import dataclasses
import math

import torch
from torch import Tensor

from alibi_attn.units import perplexity
from alibi_lab.lab.config import EvalConfig
from alibi_lab.lab.data.corpus import Corpus, CorpusError
from alibi_lab.lab.evaluation.losses import columns, in_batches
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import PositionMethod
from alibi_lab.records import Curves

NEIGHBORS = (1, 8, 64, 1024)
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75)  # λ
MOST_ENTRIES = 1 << 20  # of the datastore; 4·E bytes each, for the width E
_KEYS_AT_ONCE, _QUERIES_AT_ONCE = 1 << 16, 64


@dataclasses.dataclass(frozen=True)
class Contexts:
    """One entry per predicted token, in text order.

    Args:
        keys: [N, E] fp32, f of the tokens before it.
        tokens: [N] int64, the token.
        nats: [N] fp32, −ln p_LM of the token.
    """

    keys: Tensor
    tokens: Tensor
    nats: Tensor


class KnnLM(PositionMethod):
    """A test for models of any method; as a method to train with, it has no positions."""

    @classmethod
    def curves(cls, model: LanguageModel, corpus: Corpus, config: EvalConfig) -> Curves:
        """The losses of both halves for every k and λ ("knn_lm"), and the second half with what the first chose ("knn_lm_best").

        Raises:
            CorpusError: a text is too short.
        """
        store = contexts(model, corpus.train, most=MOST_ENTRIES, batch_tokens=config.batch_tokens)
        test = contexts(model, corpus.valid, most=config.tokens, batch_tokens=config.batch_tokens)
        half = len(test.nats) // 2
        if not half:
            found = f"the test text has {len(corpus.valid)} tokens but kNN-LM needs two to score"
            raise CorpusError(f"{found}, each after up to {model.trained_length} others; pass more text")
        most = min(NEIGHBORS[-1], len(store.tokens))
        distances, tokens = nearest(store, test.keys, most)
        rows: list[tuple[int, float, float, float]] = []
        for k in (0, *(k for k in NEIGHBORS if k <= most)):
            log_p = knn_log_probability(distances[:, :k], tokens[:, :k], test.tokens)
            for share in SHARES if k else (0.0,):
                nats = interpolated_nats(log_p, test.nats, share)
                rows.append((k, share, float(nats[:half].mean()), float(nats[half:].mean())))
        k, share, _, tested = min(rows, key=lambda row: row[2])
        plain = rows[0][3]
        best = {"entries": len(store.tokens), "k": k, "lambda": share, "tokens": len(test.nats) - half}
        best |= {"plain_nats": plain, "nats": tested}
        best |= {"plain_perplexity": perplexity(plain), "perplexity": perplexity(tested)}
        table = columns(("k", "lambda", "chosen_on_nats", "tested_nats"), rows)
        return {"knn_lm": table, "knn_lm_best": {name: [value] for name, value in best.items()}}


def contexts(model: LanguageModel, text: Tensor, *, most: int, batch_tokens: int) -> Contexts:
    """The contexts of a text: of all tokens after the first L/2, or of pieces of L/2 spread evenly over it, about `most` in all.

    Raises:
        CorpusError: the text has no more than L tokens.
    """
    length, step = model.trained_length, max(1, model.trained_length // 2)
    count = (len(text) - 1 - length) // step + 1
    if count < 1:
        raise CorpusError(f"a text has {len(text)} tokens but kNN-LM needs {length + 1} or more; pass more text")
    begins = torch.arange(count)
    if count * step > most:
        begins = torch.linspace(0, count - 1, max(1, most // step)).long()
    rows = text[step * begins[:, None] + torch.arange(length + 1)]

    def read(some: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        norm = model.blocks[-1].get_submodule("ffn_norm")
        with norm.register_forward_hook(lambda module, given, output: found.append(output)):
            nats = model(some[:, :-1], targets=some[:, -step:])
        keys = torch.cat(found, dim=1)[:, -step:]  # several if the method reads in segments
        return keys.flatten(0, 1).float(), some[:, -step:].flatten(), nats.flatten()

    return Contexts(*in_batches(model, rows, read, batch_tokens=batch_tokens))


def nearest(store: Contexts, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The squared distances [N, k] and the tokens [N, k] of the k nearest entries of each query, nearest first; exact."""
    distances, tokens = [], []
    for some in queries.split(_QUERIES_AT_ONCE):
        best, places = some.new_empty(len(some), 0), torch.empty(len(some), 0, dtype=torch.long)
        for start in range(0, len(store.keys), _KEYS_AT_ONCE):
            keys = store.keys[start : start + _KEYS_AT_ONCE]
            closeness = torch.addmm(-keys.square().sum(1) / 2, some, keys.T)  # (‖q‖² − d) / 2
            value, place = closeness.topk(min(k, len(keys)))
            best, order = torch.cat([best, value], 1).topk(min(k, best.shape[1] + value.shape[1]))
            places = torch.cat([places, place + start], 1).gather(1, order)
        exact = (store.keys[places] - some[:, None]).square().sum(-1)  # without the cancellation of the search
        exact, order = exact.sort(1)
        distances.append(exact)
        tokens.append(store.tokens[places.gather(1, order)])
    return torch.cat(distances), torch.cat(tokens)


def knn_log_probability(distances: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    """ln p_kNN of the targets [N], −inf where no neighbor has the token; distances and tokens [N, k]."""
    weights = torch.log_softmax(-distances.double(), dim=1)
    return weights.masked_fill(tokens != targets[:, None], -math.inf).logsumexp(1)


def interpolated_nats(knn_log_p: Tensor, nats: Tensor, share: float) -> Tensor:
    """−ln(λ·p_kNN + (1 − λ)·p_LM), [N] float64; `share` is λ, below 1."""
    plain = math.log1p(-share) - nats.double()
    return -(torch.logaddexp(knn_log_p + math.log(share), plain) if share else plain)
