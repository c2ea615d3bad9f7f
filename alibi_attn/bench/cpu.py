"""`alibi bench cpu`: causal ALiBi attention on this machine's processor, ours against what users would pick instead."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn import records
from alibi_attn.attention import dispatch
from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.certificate.bounds import bounds
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.validation import make_spec
from alibi_attn.bench.by_kind import records_by_kind
from alibi_attn.bench.cases import Case, draw
from alibi_attn.bench.columns import Columns
from alibi_attn.bench.exactness import Reference, computed
from alibi_attn.bench.peers import Attention, Peer, bf16_peers, cpu_peers, ours_dropping, reason
from alibi_attn.bench.timing import matrix_product, matrix_rate_gflops, medians_ms
from alibi_attn.slopes import alibi_slopes

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PRODUCT = "matrix product"  # of fp32


def cpu(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    kinds: Sequence[str] = ("noise",),
    repeats: int = 5,
    budget_s: float = 20.0,
    memory: bool = True,
    dropout_p: float = 0.0,
    dtype: str = "float32",
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Measure and keep one record for every kind of input; returns their paths.

    Args:
        lengths: in tokens, n = T = S; 8 heads × 64.
        batch: so many rows at once.
        kinds: of input, see `cases.draw`.
        repeats, budget_s: turns at most, and seconds at most that the turns of one length and direction may take.
        memory: also measure peak memory, each in a process of its own.
        dropout_p: measure ours with so much dropout, too; 0 = it is left out.
        dtype: "float32", or "bfloat16", which is measured beside ours in fp32 of the same numbers.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r} but must be one of {', '.join(DTYPES)}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p} but must be a probability in [0, 1); 0 measures none")
    half = dtype == "bfloat16"
    peers = [*(bf16_peers() if half else cpu_peers()), *([ours_dropping(dropout_p)] if dropout_p > 0 else [])]
    configs: dict[str, dict[str, records.Json]] = {
        kind: {
            "kind": kind, "heads": 8, "head_dim": 64, "dtype": dtype, "lengths": list(lengths), "batch": batch,
            "threads": torch.get_num_threads(), "peers": {peer.name: peer.note for peer in peers},
        }
        for kind in kinds
    }  # fmt: skip
    asked = {"bf16": half, "dropout": dropout_p > 0, f"batch-{batch}": batch > 1}
    return records_by_kind(
        out, "-".join(["cpu", *(part for part, is_asked in asked.items() if is_asked)]), configs, lengths=lengths,
        summary=_summary, say=say,
        train_step=functools.partial(_train_step, dtype=DTYPES[dtype], batch=batch) if memory else None,
        measure=lambda kind, n: _measure(
            Case(kind, n, batch), DTYPES[dtype], peers=peers, repeats=repeats, budget_s=budget_s, say=say
        ),
    )  # fmt: skip


def _measure(
    case: Case, dtype: torch.dtype, *, peers: Sequence[Peer], repeats: int, budget_s: float, say: Callable[[str], None]
) -> dict[str, dict[str, records.Json]]:
    """Rows by peer, and the row "reach" with what the certificate asks for.

    A matrix product takes turns with the peers, so that it says how fast the machine was while they ran.
    """
    query, key, value, grad = (x.to(dtype) for x in draw(case))
    slopes = torch.tensor(alibi_slopes(case.num_heads), dtype=torch.float32)
    references = {
        p: Reference.of(query, key, value, grad, slopes, dropout_p=p) for p in {peer.dropout_p for peer in peers}
    }
    rows: dict[str, dict[str, records.Json]] = {}
    calls: dict[str, Callable[[], object]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for peer in peers:
        q, k, v, do = (x if peer.dtype is None else x.to(peer.dtype) for x in (query, key, value, grad))
        wanted = do if case.length <= peer.longest_backward else None
        attention, rows[peer.name] = _checked(peer, references[peer.dropout_p], q, k, v, wanted, slopes)
        if attention is None:
            say(f"{peer.name} is left out at {case.length}: {rows[peer.name]['why_not']}")
            continue
        calls[peer.name] = _forward(attention, q, k, v)
        if wanted is not None:
            steps[peer.name] = _backward(attention, q, k, v, wanted)
    product = matrix_product()
    forward = medians_ms({_PRODUCT: product, **calls}, repeats=repeats, budget_s=budget_s)
    backward = medians_ms({_PRODUCT: product, **steps}, repeats=repeats, budget_s=budget_s)
    for name, row in rows.items():
        row["forward_ms"], row["backward_ms"] = forward.get(name), backward.get(name)
    rates = [matrix_rate_gflops(turns.pop(_PRODUCT)) for turns in (forward, backward)]
    rows["reach"] = _reach_row(case, query, key, value, forward["ours"], backward["ours"], rates)
    ours = forward["ours"] + backward["ours"]
    said = [f"{n} {forward[n]:.0f}+{backward[n]:.0f} ms ({(forward[n] + backward[n]) / ours:.2f}×)" for n in backward]
    said += [
        f"{n} {forward[n]:.0f} ms forward ({forward[n] / forward['ours']:.2f}×)" for n in forward if n not in backward
    ]
    say(f"{case.name}: " + ", ".join(said))
    say(f"   reach: {rows['reach']}")
    return rows


def _checked(
    peer: Peer, reference: Reference, query: Tensor, key: Tensor, value: Tensor, grad: Tensor | None, slopes: Tensor
) -> tuple[Attention | None, dict[str, records.Json]]:
    """(the peer, ready to be timed; its row with its errors), or (None, a row that says why it is not timed).

    Raises:
        RuntimeError: it is wrong; or it is ours, and cannot run.
    """
    length = query.shape[2]
    row: dict[str, records.Json] = {
        "length": length, "relative_error": None, "gradient_error": None, "why_not": None
    }  # fmt: skip
    if length > peer.longest:
        return None, {**row, "why_not": f"not tried beyond {peer.longest} tokens"}
    try:
        attention = peer.prepare(query, key, value, slopes)
        found = computed(attention, query, key, value, grad)
    except (RuntimeError, ImportError) as refusal:
        if peer.is_ours:
            raise
        return None, {**row, "why_not": reason(refusal)}
    errors = reference.compare(peer, found)
    if errors.wrong is not None:
        raise RuntimeError(errors.wrong)
    return attention, {**row, "relative_error": errors.output, "gradient_error": errors.gradient}


def _forward(attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return attention(query, key, value)

    return call


def _backward(attention: Attention, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = attention(*leaves)

    def call() -> object:
        return torch.autograd.grad(output, leaves, grad, retain_graph=True)

    return call


def _reach_row(
    case: Case, query: Tensor, key: Tensor, value: Tensor, forward_ms: float, backward_ms: float, rates: list[float]
) -> dict[str, records.Json]:
    """What the certificate asks for, what is computed, and the share of the matrix `rates` (forward, backward) it makes."""
    spec = make_spec(query, key, value)
    name = dispatch.choose("auto", spec, query, key, value)
    with torch.no_grad():
        left, computed = _certified_reach(name, spec, query, key, value)
    row = torch.arange(case.length)
    asked = torch.minimum(left[..., row // TILE], row + 1).sum()
    causal = case.batch * case.num_heads * case.length * (case.length + 1) // 2
    bounded = left[left < case.length]  # blocks that leave keys out
    flops = 4 * case.head_dim * int(asked)
    return {
        "length": case.length,
        "backend": name,
        "widest_reach": int(bounded.max()) if len(bounded) else case.length,
        "scores_asked_share": int(asked) / causal,
        "scores_computed_share": computed / causal,
        "forward_matrix_gflops": rates[0],
        "backward_matrix_gflops": rates[1],
        "forward_rate_share": flops / forward_ms / 1e6 / rates[0],
        "backward_rate_share": 2.5 * flops / backward_ms / 1e6 / rates[1],
    }


def _certified_reach(
    name: str, spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, int]:
    """(how far each block of TILE queries must look, [B, H, N], scores that the backend computes)."""
    if name == "native":  # its certificate is part of its loop
        visited = native.visited(spec, query, key, value)
        start = torch.arange(visited.keys.shape[2]) * TILE
        near = torch.from_numpy(visited.keys[..., 0]).long()
        left = torch.where(near > 0, start - near + 1, key.shape[2])  # where all is met, nothing bounds a query's reach
        return left, int(visited.reach_and_scores(spec)[1].sum())
    visits = dispatch.BACKENDS[name].visits(spec, query, key, value)
    computed = query.shape[:3].numel() * key.shape[2] if visits is None else int(visits[1].sum())
    return bounds(spec, query, key, value).left, computed


def _train_step(kind: str, length: int, *, dtype: torch.dtype, batch: int) -> None:
    query, key, value, grad = (x.to(dtype) for x in draw(Case(kind, length, batch)))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    alibi_attention(*leaves).backward(grad)


def _summary(columns: Columns) -> dict[str, float | None]:
    """Growth of cost of every peer: the slope of log time against log length over its longest half of lengths."""
    growth: dict[str, float | None] = {}
    for name, column in columns.items():
        if "forward_ms" not in column:
            continue
        points = [
            (float(n), float(f) + float(b))  # type: ignore[arg-type]
            for n, f, b in zip(column["length"], column["forward_ms"], column["backward_ms"], strict=True)
            if b is not None
        ]
        points = points[len(points) // 2 :] if len(points) > 3 else points
        if len(points) < 2:
            continue
        x, y = torch.tensor(points).log().unbind(1)
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        growth[f"growth of {name}"] = float(slope)
    return growth
