"""One query and a long cache, with and without a CUDA graph: a layer's static caches beside SDPA over all keys.

A step writes its key and value into the cache and attends; the layer's linear layers are left out. A static cache grows by some
hundred tokens while it is timed; SDPA always reads the first number.
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from alibi_attn import ALiBiAttention
from alibi_attn.nn import StaticKVCache
from alibi_lab.measure.gpu_parts import GRAPH, Calls, Case, Part, call_row, cases, drawn
from alibi_lab.measure.gpu_truth import Truth, biased_by, head
from alibi_lab.measure.harness import Row
from alibi_lab.measure.timing import replayable

ROOM = 1024  # tokens that a static cache holds beyond those before the measurement
OURS, REACH, SDPA = "ours", "ours, reach", "SDPA, no bias"


class Given(nn.Module):
    """In place of a linear layer: it returns the same heads [B, H, 1, D] whatever it gets."""

    def __init__(self, heads: Tensor) -> None:
        super().__init__()
        self.rows = heads.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows


def layer_of(query: Tensor, key: Tensor, value: Tensor) -> ALiBiAttention:
    """A layer without linear layers, whose queries, keys and values are always these heads, each [B, H, 1, D]."""
    layer = ALiBiAttention(query.shape[1] * query.shape[3], query.shape[1]).eval()
    for name, heads in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
        setattr(layer, name, Given(heads))
    layer.out_proj = nn.Identity()  # type: ignore[assignment]
    return layer


def decoding(case: Case, device: torch.device) -> Calls:
    """The step that makes `case.length` tokens of one fewer, with each cache."""
    keys, values = drawn(case, device, 2)
    query, key, value = drawn(case, device, 3, tokens=1, seed=1)
    keys[:, :, -1:], values[:, :, -1:] = key, value
    layer, x = layer_of(query, key, value).to(query), query.transpose(1, 2).flatten(2)
    slope = head(layer.slopes.values[None, :, None].double())
    distance = torch.arange(case.length - 1, -1, -1, device=device, dtype=torch.float64)
    biased, unbiased = (Truth.of(biased_by(-m * distance), (query, keys, values)) for m in (slope, 0 * slope))

    def ours(*, reach: bool, graph: bool) -> Row:
        """With a `StaticKVCache`, or with a static cache of the reach that the norms of these keys imply."""
        longest = [float(torch.linalg.vector_norm(rows.float(), dim=-1).max()) for rows in (query, keys)]
        bound, capacity = 1.01 * longest[0] * longest[1] * case.head_dim**-0.5, case.length + ROOM
        cache = (
            layer.reach_cache(score_bound=bound, tolerance=biased.eps / 32).static(capacity)  # type: ignore[union-attr]
            if reach
            else StaticKVCache(capacity)
        )

        def step() -> Tensor:
            return layer(x, cache=cache)

        def fill() -> None:
            cache.crop(0)
            cache.append(keys[:, :, :-1], values[:, :, :-1])

        fill()
        step()
        run = replayable(step, device) if graph else step
        fill()
        row = biased.row([run().unflatten(-1, (case.heads, -1)).transpose(1, 2)])
        fill()
        return call_row(row, run, device)

    def sdpa(*, graph: bool) -> Row:
        """SDPA over all keys, without a bias."""

        def step() -> Tensor:
            keys[:, :, -1:], values[:, :, -1:] = key, value
            return functional.scaled_dot_product_attention(query, keys, values)

        run = replayable(step, device) if graph else step
        return call_row(unbiased.row([run()]), run, device)

    calls = Calls()
    for way in ("", GRAPH):
        calls[OURS + way] = functools.partial(ours, reach=False, graph=way == GRAPH)
        calls[REACH + way] = functools.partial(ours, reach=True, graph=way == GRAPH)
        calls[SDPA + way] = functools.partial(sdpa, graph=way == GRAPH)
    return calls


NOTES = {
    OURS: "ALiBiAttention without its linear layers, StaticKVCache",
    REACH: "the same with reach_cache().static(), whose bound comes from the norms of the keys",
    SDPA: "scaled_dot_product_attention of one query; no ALiBi at all",
}
PEERS = {name + way: note + way for way in ("", GRAPH) for name, note in NOTES.items()}
CASES = cases("1x2048x16x128 1x16384x16x128 1x131072x16x128")
DECODING = Part("decoding", 15.0, PEERS, CASES, decoding)
