"""Cases of attention and their inputs: noise, with a sink, a table, the plane, masks, gates, and those of a trained model."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn import alibi_slopes
from alibi_lab.lab.config import check_choice

BATCH_TOKENS = 16384  # of a batch on a GPU, at least one sequence
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """One input of attention.

    Args:
        kind: a name in KINDS.
        length, queries: S keys; the T queries are the last ones, by default as many as keys.
        path: kinds of trained models only: a checkpoint of `alibi run`.
    """

    kind: str
    length: int
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    queries: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    path: Path | None = None

    @property
    def scores(self) -> int:
        """The number of scores of a causal call."""
        rows = self.queries or self.length
        return self.batch * self.heads * (rows * self.length - rows * (rows - 1) // 2)


def cases_of(
    lengths: Sequence[int], *, dtype: str, device: str, kind: str = "noise", batch: int = 0, **fields: Any
) -> list[Case]:
    """A case per length, with further fields of `Case`; a batch of 0 is 1, or on a GPU as many as have BATCH_TOKENS."""
    fields |= {"kind": kind, "dtype": DTYPES[dtype], "device": torch.device(device)}
    most = BATCH_TOKENS if device == "cuda" else 1
    return [Case(length=n, batch=batch or max(1, most // n), **fields) for n in lengths]


def described(cases: Sequence[Case]) -> dict[str, Any]:
    """What the config of a record says of its cases, which differ in length."""
    one = cases[0]
    sizes = {"lengths": [case.length for case in cases], "heads": one.heads, "head_dim": one.head_dim}
    kind = {"dtype": str(one.dtype).removeprefix("torch."), "device": one.device.type}
    return {**sizes, **kind, "threads": torch.get_num_threads()}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs that all peers of a case get.

    Args:
        query, grad: [B, H, T, D]; `grad` is the gradient of the output.
        key, value: [B, H, S, D].
        slopes: [H] fp32; 0 where gates replace them.
        log_fgate: ln of the forget gates, [B, H, S]; None = no gates.
        key_mask: [B, S], True = visible, of symmetric attention; None = causal attention without a mask.
        table: [H, S] fp32, the bias by distance, in place of slopes, which are 0; None = no table.
        points: [B, S, 2] fp32, where the tokens of symmetric attention lie in the plane; None = on a line.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    slopes: Tensor
    log_fgate: Tensor | None = None
    key_mask: Tensor | None = None
    table: Tensor | None = None
    points: Tensor | None = None

    @property
    def causal(self) -> bool:
        return self.key_mask is None and self.points is None

    def converted(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another dtype; slopes, gates and table stay in fp32."""
        names = ("query", "key", "value", "grad")
        return dataclasses.replace(self, **{name: getattr(self, name).to(dtype) for name in names})


def published_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """[H] fp32."""
    return torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)


def draw(case: Case) -> Inputs:
    """The inputs of a case, the same ones in every run."""
    check_choice("inputs", case.kind, tuple(KINDS))
    return KINDS[case.kind](case)


def noise(case: Case, *, queries: float = 1.0, first_key: float = 1.0) -> Inputs:
    """Standard normal numbers; queries and the first key are longer by these factors."""
    generator = torch.Generator(case.device).manual_seed(0)
    shape = (case.batch, case.heads, case.length, case.head_dim)
    parts = (torch.randn(shape, generator=generator, device=case.device) for _ in range(4))
    query, key, value, grad = (x.to(case.dtype) for x in parts)
    query, grad = (x[:, :, -(case.queries or case.length) :] for x in (query, grad))
    key[:, :, 0] *= first_key
    return Inputs(query * queries, key, value, grad, published_slopes(case.heads, case.device))


def root_distance(case: Case) -> Inputs:
    """√-ALiBi, as in Step-1: the bias is −m·√(i − j)."""
    plain = noise(case)
    distance = torch.arange(case.length, dtype=torch.float32, device=case.device)
    return dataclasses.replace(plain, slopes=0 * plain.slopes, table=-plain.slopes[:, None] * distance.sqrt())


def plane(case: Case) -> Inputs:
    """Symmetric, for patches of an image, row by row; coordinates count patches."""
    side = math.ceil(case.length**0.5)
    patch = torch.arange(case.length, device=case.device)
    points = torch.stack([patch // side, patch % side], -1).float().expand(case.batch, -1, -1)
    return dataclasses.replace(noise(case), points=points)


def masked(case: Case) -> Inputs:
    """Symmetric, with padding: texts of a third of the length or more, one of them as long as the batch."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(case.length // 3, case.length + 1, (case.batch,), generator=generator)
    lengths[0] = case.length if case.batch > 1 else lengths[0]
    key_mask = (torch.arange(case.length) < lengths[:, None]).to(case.device)
    return dataclasses.replace(noise(case), key_mask=key_mask)


def gates(case: Case, *, logit: float, bound: float) -> Inputs:
    """Normalized noise, whose scores stay below `bound`, with gates sigmoid(N(logit, 1)) in place of slopes."""
    plain = noise(case)
    size = (bound * case.head_dim**0.5) ** 0.5  # the norm of queries and keys that bounds the scores
    query, key = (functional.normalize(x, dim=-1) * size for x in (plain.query, plain.key))
    logits = torch.randn(plain.key.shape[:3], generator=torch.Generator().manual_seed(1)) + logit
    log_fgate = functional.logsigmoid(logits).to(case.device)
    return dataclasses.replace(plain, query=query, key=key, slopes=0 * plain.slopes, log_fgate=log_fgate)


def trained(case: Case) -> Inputs:
    """Queries, keys, values and gates of all layers of a trained model on its held-out text; layers are the batch."""
    if case.path is None:
        raise ValueError(
            "inputs of kind 'trained' need --checkpoint, a model of alibi run with alibi, fox or alibi-fox"
        )
    whole = _captured(case.path, case.length)
    query, key, value = (x.to(case.device, case.dtype) for x in (whole.query, whole.key, whole.value))
    gates = None if whole.log_fgate is None else whole.log_fgate.to(case.device)
    grad = torch.randn(query.shape, generator=torch.Generator().manual_seed(0)).to(query)
    return Inputs(query, key, value, grad, whole.slopes.to(case.device), gates)


@functools.lru_cache(maxsize=1)
def _captured(path: Path, length: int) -> Inputs:
    from alibi_lab.lab.data.corpus import load_corpus
    from alibi_lab.lab.model.layer_outputs import attention_inputs
    from alibi_lab.lab.training.checkpoint import load_checkpoint, stored_tokens

    model, config = load_checkpoint(path)
    tokens = load_corpus(config.data, stored_tokens(path)).valid[:length]
    if len(tokens) < length:
        raise ValueError(f"{path} has {len(tokens)} held-out tokens but {length} are needed; pass shorter --lengths")
    query, key, value, bias = attention_inputs(model, tokens[None].long())
    return Inputs(query, key, value, value, *bias)


GATES = {
    f"gates-{logit}-U-{bound}": functools.partial(gates, logit=logit, bound=bound)
    for logit in (2, 4, 6, 12)
    for bound in (8, 16)
}
KINDS: Mapping[str, Callable[[Case], Inputs]] = {
    "noise": noise,
    "peaked": functools.partial(noise, queries=3.0),
    "sink": functools.partial(noise, first_key=10.0),
    "root-distance": root_distance,
    "plane": plane,
    "masked": masked,
    "trained": trained,
    **GATES,
}
