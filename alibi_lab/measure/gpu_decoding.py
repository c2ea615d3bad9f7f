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
from alibi_lab.measure.gpu_parts import (
    GRAPH,
    Calls,
    Case,
    Part,
    Truth,
    biased_by,
    call_row,
    drawn,
    head,
    number_type,
)
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


class Step:
    """The step that makes `case.length` tokens of one fewer."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.keys, self.values = drawn(case, device, 2)
        self.query, self.key, self.value = drawn(case, device, 3, tokens=1, seed=1)
        self.keys[:, :, -1:], self.values[:, :, -1:] = self.key, self.value
        self.layer = ALiBiAttention(case.heads * case.head_dim, case.heads).to(device, number_type(device)).eval()
        for name, rows in (("q_proj", self.query), ("k_proj", self.key), ("v_proj", self.value)):
            setattr(self.layer, name, Given(rows))
        self.layer.out_proj = nn.Identity()  # type: ignore[assignment]
        slope = head(self.layer.slopes.values[None, :, None].double())
        distance = torch.arange(case.length - 1, -1, -1, device=device, dtype=torch.float64)
        every = self.query, self.keys, self.values
        self.biased = Truth.of(biased_by(-slope * distance), every)
        self.unbiased = Truth.of(biased_by(0 * distance), every)

    def ours(self, *, reach: bool, graph: bool) -> Row:
        """With a `StaticKVCache`, or with a static cache of the reach that the norms of these keys imply."""
        layer, capacity, x = self.layer, self.case.length + ROOM, self.query.transpose(1, 2).flatten(2)
        longest = [float(torch.linalg.vector_norm(rows.float(), dim=-1).max()) for rows in (self.query, self.keys)]
        bound, tolerance = 1.01 * longest[0] * longest[1] * self.case.head_dim**-0.5, self.biased.eps / 32
        cache = (
            layer.reach_cache(score_bound=bound, tolerance=tolerance).static(capacity)  # type: ignore[union-attr]
            if reach
            else StaticKVCache(capacity)
        )

        def step() -> Tensor:
            with torch.no_grad():
                output: Tensor = layer(x, cache=cache)
                return output

        def fill() -> None:
            with torch.no_grad():
                cache.crop(0)
                cache.append(self.keys[:, :, :-1], self.values[:, :, :-1])

        fill()
        step()
        run = replayable(step, self.device) if graph else step
        fill()
        row = self.biased.row([run().unflatten(-1, (self.case.heads, -1)).transpose(1, 2)])
        if row["right"]:
            fill()
            row |= call_row(run, self.device)
        return row

    def sdpa(self, *, graph: bool) -> Row:
        """SDPA over all keys, without a bias."""

        def step() -> Tensor:
            with torch.no_grad():
                self.keys[:, :, -1:], self.values[:, :, -1:] = self.key, self.value
                return functional.scaled_dot_product_attention(self.query, self.keys, self.values)

        run = replayable(step, self.device) if graph else step
        row = self.unbiased.row([run()])
        return row | call_row(run, self.device) if row["right"] else row


def decoding(case: Case, device: torch.device) -> Calls:
    """One step of each cache."""
    step, calls = Step(case, device), Calls()
    for way in ("", GRAPH):
        calls[OURS + way] = functools.partial(step.ours, reach=False, graph=way == GRAPH)
        calls[REACH + way] = functools.partial(step.ours, reach=True, graph=way == GRAPH)
        calls[SDPA + way] = functools.partial(step.sdpa, graph=way == GRAPH)
    return calls


NOTES = {
    OURS: "ALiBiAttention without its linear layers, StaticKVCache",
    REACH: "the same with reach_cache().static(), whose bound comes from the norms of the keys",
    SDPA: "scaled_dot_product_attention of one query; no ALiBi at all",
}
DECODING = Part(
    "decoding",
    15.0,
    {name + way: note + way for way in ("", GRAPH) for name, note in NOTES.items()},
    {"full": tuple(Case(1, n, 16, 128) for n in (2048, 16384, 131072)), "smoke": (Case(1, 70, 2, 16),)},
    decoding,
)
