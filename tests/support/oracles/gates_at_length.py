"""Attention with large sums of forget gates: compares outputs of selected queries, and the gates' gradient, with fp64.

python tests/support/oracles/gates_at_length.py results            # 131,072 tokens; saves a record; minutes on one core

Queries and keys are normalized noise with scores of at most U = 8, gates are sigmoid(N(logit, 1)); heads of 64. The truth is
computed here in fp64, for blocks of queries and the keys that weigh more than e^−45 of the query's own key.
"""

import datetime
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from alibi_attn import alibi_attention, forgetting_attention
from alibi_attn.slopes import alibi_slopes
from alibi_lab import records

LENGTH, HEADS, HEAD_DIM, BOUND = 131_072, 2, 64, 8.0
LOGITS = (2.0, 4.0, 6.0)
ROWS = 64  # queries at the end, and the same number in the middle
BLOCK = 512
LEFT_OUT = 45.0  # nats


def draw(length: int, logit: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(query, key, value, gradient of the output) [1, H, n, D] in this dtype, ln f [1, H, n] fp32."""
    rng = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, HEADS, length, HEAD_DIM, generator=rng) for _ in range(4))
    size = (BOUND * HEAD_DIM**0.5) ** 0.5
    query, key = (normalize(x, dim=-1) * size for x in (query, key))
    gates = logsigmoid(torch.randn(1, HEADS, length, generator=rng) + logit)
    narrow = (x.to(dtype) for x in (query, key, value, grad))
    return *narrow, gates  # type: ignore[return-value]


def forward_errors(length: int, logit: float) -> dict[str, float]:
    """Largest errors of selected fp32 outputs, relative to max‖v‖: with gates, and with fixed slopes."""
    query, key, value, _, gates = draw(length, logit, torch.float32)
    slopes = alibi_slopes(8)[[1, 5]]  # a steep head and a flat one
    i = torch.cat([torch.arange(length // 2, length // 2 + ROWS), torch.arange(length - ROWS, length)])
    distance = i[:, None] - torch.arange(length)
    c = gates.double().cumsum(-1)[0]
    errors = {}
    for name, found in (
        ("gates", forgetting_attention(query, key, value, gates)),
        ("slopes", alibi_attention(query, key, value, slopes.tolist())),
    ):
        worst = 0.0
        for head in range(HEADS):
            scores = query[0, head, i].double() @ key[0, head].double().T * HEAD_DIM**-0.5
            bias = c[head, i, None] - c[head] if name == "gates" else -slopes[head] * distance
            weights = (scores + bias).masked_fill(distance < 0, -math.inf).softmax(-1)
            off = found[0, head, i].double() - weights @ value[0, head].double()
            worst = max(worst, float(off.norm(dim=-1).max()))
        errors[name] = worst / float(value.norm(dim=-1).max())
    return errors


def gate_gradient(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, gates: Tensor) -> Tensor:
    """[1, H, n] fp64, Σ over rows i ≥ l of (row sum of ds − column sum of ds)."""
    query, key, value, grad = (x[0].double() for x in (query, key, value, grad))
    heads, length = gates.shape[1:]
    c = gates[0].double().cumsum(-1)
    sums = torch.zeros(heads, length, dtype=torch.float64)
    for head in range(heads):
        for start in range(0, length, BLOCK):
            end = min(start + BLOCK, length)
            seen = c[head, start] - c[head, :end] + 2 * BOUND >= -LEFT_OUT
            low = int(seen.int().argmax())
            scores = query[head, start:end] @ key[head, low:end].T * HEAD_DIM**-0.5
            scores += c[head, start:end, None] - c[head, low:end]
            future = torch.arange(low, end) > torch.arange(start, end)[:, None]
            weights = scores.masked_fill_(future, -math.inf).softmax(-1)
            of_weights = grad[head, start:end] @ value[head, low:end].T
            ds = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
            sums[head, start:end] += ds.sum(-1)
            sums[head, low:end] -= ds.sum(0)
    found = sums.flip(-1).cumsum(-1).flip(-1)
    found[:, 0] = 0  # no key lies before the first gate
    return found[None]


def gradient_errors(length: int, logit: float, dtype: torch.dtype) -> dict[str, float]:
    """Errors of the gates' gradient by the truth's rms: ours, and autograd's through −cumsum(ln f) as a key_bias.

    Mathematically both are equal, since rows of ds sum to 0; in floating point the rows' rounding errors accumulate.
    """
    query, key, value, grad, gates = draw(length, logit, dtype)
    exact = gate_gradient(query, key, value, grad, gates)
    scale = float(exact.square().mean().sqrt())
    found = {}
    for name in ("ours", "of key_bias"):
        leaf = gates.clone().requires_grad_()
        if name == "ours":
            output = forgetting_attention(query, key, value, leaf)
        else:
            output = alibi_attention(query, key, value, [0.0] * HEADS, key_bias=-leaf.double().cumsum(-1))
        (off,) = torch.autograd.grad(output, leaf, grad)
        off = off.double() - exact
        found |= {
            f"{name}, rms": float(off.square().mean().sqrt()) / scale,
            f"{name}, largest": float(off.abs().max()) / scale,
        }
    return found | {"rms of the truth": scale}


def main(out: Path, length: int = LENGTH) -> None:
    started, forward, gradient = datetime.datetime.now(datetime.UTC), [], []
    for logit in LOGITS:
        forward.append({"logit": logit, **forward_errors(length, logit)})
        print(forward[-1], flush=True)
        for dtype in (torch.float32, torch.bfloat16):
            errors = gradient_errors(length, logit, dtype)
            gradient.append({"logit": logit, "dtype": str(dtype).removeprefix("torch."), **errors})
            print(gradient[-1], flush=True)
    narrow = [row["ours, rms"] for row in gradient if row["dtype"] == "bfloat16"]
    curves = {"forward": forward, "gates' gradient": gradient}
    record = records.make(
        "conformance",
        "gates/at-length",
        config={"length": length, "heads": HEADS, "head_dim": HEAD_DIM, "score_bound": BOUND, "rows": 2 * ROWS},
        metrics={
            "error over that of fixed slopes, worst": max(row["gates"] / row["slopes"] for row in forward),
            "gates' gradient in bf16, worst rms": max(narrow),
        },
        curves={name: {column: [row[column] for row in rows] for column in rows[0]} for name, rows in curves.items()},
        started=started,
    )
    print(records.save(record, out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
