"""Sequences of everything that a cache can do, compared with one pass over plain tensors.

The truth holds keys, values and gates of all tokens as tensors that are concatenated, cut and indexed, and attends with the
`reference` backend. A step that a cache refuses must leave it as it was.
"""

import contextlib
import copy
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from alibi_attn import ALiBiAttention, KVCache, alibi_attention, forgetting_attention
from alibi_attn.attention.call.transforms import may_read
from alibi_attn.attention.certificate.norms import Norms, in_tiles
from alibi_attn.attention.run import decoding
from alibi_attn.nn.cache import fixed

WIDTH, HEADS, KEY_HEADS, ROWS, CAPACITY = 64, 4, 2, 2, 400
SLOPES = [1.5, 0.4, 0.1, 0.0]

REACH = {"tolerance": 1e-6}
# How a cache stores × what it may forget: the options of its layer, and of the cache, or of `reach_cache`.
KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "memory": ({}, {}),
    "memory, window": ({"window": 40}, {}),
    "memory, sinks": ({"window": 40, "sinks": 3}, {}),
    "memory, gates": ({"forget_gate": True}, {}),
    "memory, windows of heads": ({"window": [40, 5, 20, 60]}, {}),
    "memory, gates, window": ({"forget_gate": True, "window": 40}, {}),
    "file": ({}, {"path": "cache"}),
    "file, sinks": ({"window": 40, "sinks": 3}, {"path": "cache"}),
    "stream": ({}, {"max_tokens": 30, "sinks": 2}),
    "stream, window": ({"window": 12, "sinks": 2}, {"max_tokens": 30, "sinks": 2}),
    "reach": ({"qk_norm": True}, REACH),
    "reach, sinks": ({"qk_norm": True, "window": 30, "sinks": 3}, REACH),
    "gates": ({"qk_norm": True, "forget_gate": True}, REACH),
    "gates, window": ({"qk_norm": True, "forget_gate": True, "window": 40}, REACH),
    "capacity": ({}, {"capacity": CAPACITY}),
    "capacity, window": ({"window": 40}, {"capacity": CAPACITY}),
    "capacity, reach": ({"qk_norm": True, "slopes": [1.5, 0.4, 0.8, 0.2]}, REACH | {"capacity": CAPACITY}),
}
ACTIONS = (*["append"] * 3, "crop", "reorder", "repeat", "copy", "pickle", "save", "edit", "replay", "mask")


def attend_at(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, norms: Norms, first: Tensor, **options: object
) -> Tensor:
    """Stands for the kernel that reads the tiles within reach by their norms, and checks that these bound all keys."""
    if may_read(first, key):  # not traced
        written = torch.arange(key.shape[2]) < first + query.shape[2]
        for rows, bounds in ((key, norms.keys), (value, norms.values)):
            longest = in_tiles(rows.double().norm(dim=-1) * written).amax(-1)
            assert bool((longest <= bounds).all()), "a norm is not a bound"
    return alibi_attention(query, key, value, slopes, query_offset=first, **options)


AS_ON_A_DEVICE = (
    (fixed, "skips_on_device", lambda key: True),
    (decoding, "reads_near_at", lambda query: True),
    (decoding, "attend_at", attend_at),
)


class Truth:
    """All tokens as plain tensors: x [B, S, E], key and value [B, K, S, D], gates [B, H, S]."""

    def __init__(self, layer: ALiBiAttention) -> None:
        self.layer, self.hidden = layer, torch.zeros(ROWS, 0, dtype=torch.bool)
        self.key = self.value = torch.zeros(ROWS, KEY_HEADS, 0, layer.head_dim)
        self.gates = torch.zeros(ROWS, HEADS, 0)

    def append(self, x: Tensor, stream: tuple[int, int] | None) -> Tensor:
        """The outputs of new tokens [B, T, E]; with (max_tokens, sinks) one after another."""
        if stream is not None:
            return torch.cat([self._one(token, stream) for token in x.split(1, dim=1)], 1)
        return self._one(x, None)

    def _one(self, x: Tensor, stream: tuple[int, int] | None) -> Tensor:
        layer = self.layer
        query, key, value = (
            part(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = layer.q_norm(query), layer.k_norm(key)
        self.key, self.value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        if layer.gate_proj is not None:
            self.gates = torch.cat([self.gates, layer.gate_proj(x)], 2)
        self.hidden = torch.cat([self.hidden, torch.zeros(len(x), x.shape[1], dtype=torch.bool)], 1)
        if stream is not None and self.key.shape[2] > stream[0]:
            kept = [at for at in range(self.key.shape[2]) if at != stream[1]]
            self.take(lambda tensor: tensor[:, :, kept])
        options = {"window": layer.window, "backend": "reference", "key_mask": ~self.hidden}
        if layer.gate_proj is not None:
            mixed = forgetting_attention(query, self.key, self.value, self.gates, layer.slopes.values, **options)
        else:
            sinks = layer.sinks_of_window
            mixed = alibi_attention(query, self.key, self.value, layer.slopes.values, sinks=sinks, **options)
        return layer.out_proj(mixed.transpose(1, 2).flatten(2))

    def take(self, of: Callable[[Tensor], Tensor]) -> None:
        """Keeps some tokens."""
        self.key, self.value = of(self.key), of(self.value)
        self.gates = of(self.gates) if self.layer.gate_proj is not None else self.gates
        self.hidden = of(self.hidden[:, None])[:, 0]

    def rows(self, rows: list[int]) -> None:
        """Row b becomes the former row `rows[b]`."""
        self.key, self.value, self.hidden = self.key[rows], self.value[rows], self.hidden[rows]
        self.gates = self.gates[rows] if self.layer.gate_proj is not None else self.gates


@torch.no_grad()
def check(kind: str, steps: list[tuple[str, int]], *, near: bool) -> dict[str, int]:
    """Raises an AssertionError unless every output is the truth's; returns how often each action was not refused.

    Args:
        near: decode by reading near keys only, however few there are; with a capacity as on a device, by norms.
    """
    torch.manual_seed(0)
    options, of_cache = KINDS[kind]
    layer = ALiBiAttention(WIDTH, HEADS, num_kv_heads=KEY_HEADS, **{"slopes": SLOPES, **options}).eval()
    if layer.gate_proj is not None:
        torch.nn.init.constant_(layer.gate_proj.bias, 1.5)
    generator, done = torch.Generator().manual_seed(1), dict.fromkeys(ACTIONS, 0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.object(decoding, "LONG", 0 if near else 2**60))
        if near and kind.startswith("capacity"):
            for where, name, stand_in in AS_ON_A_DEVICE:
                stack.enter_context(mock.patch.object(where, name, stand_in))
        path, truth = Path(folder), Truth(layer)
        if "path" in of_cache:
            of_cache = {"path": path / of_cache["path"]}
        cache = layer.reach_cache(**of_cache) if "tolerance" in of_cache else KVCache(**of_cache)
        for number, (action, size) in enumerate([*steps, ("append", 1)]):
            batch, held = truth.key.shape[0], truth.key.shape[2]
            if action in ("append", "mask", "replay"):
                count = 1 if action == "replay" else 1 + size % (200 if size % 7 == 0 else 5)
                if cache.capacity is not None and held + count > CAPACITY:
                    continue
                _append(cache, truth, torch.randn(batch, count, WIDTH, generator=generator), action)
                done[action] += 1
                continue
            if not held and action not in ("copy", "pickle"):
                continue
            before = len(cache), cache.kept
            try:
                cache = _changed(cache, truth, action, size, path / f"{number}")
                done[action] += 1
            except ValueError:
                assert (len(cache), cache.kept) == before, f"a refused {action} has changed the cache"
    return done


def _append(cache: KVCache, truth: Truth, x: Tensor, action: str) -> None:
    layer, given = truth.layer, {}
    held, count = truth.key.shape[2], x.shape[1]
    masked = action == "mask" and cache.retention is None and cache.max_tokens is None
    if masked or bool(truth.hidden.any()):
        truth.hidden[0, : max(held - 1, 0)] |= masked  # the first row is padding up to here
        room = (cache.capacity or held + count) - held
        given["key_mask"] = torch.cat([~truth.hidden, torch.ones(len(x), room, dtype=torch.bool)], 1)
    step = torch.nn.Module.__call__
    if action == "replay" and cache.fixed is not None and cache.fixed.length is not None and not given:
        twin = copy.deepcopy(cache)
        graph = make_fx(lambda token: layer(token, cache=twin))(x)  # traced on a copy, whose tensors it holds
        assert "lift_fresh" not in graph.code, "a device would fetch a constant from the host"
        refill(twin.fixed, cache.fixed)
        torch.testing.assert_close(graph(x), layer(x, cache=copy.deepcopy(cache)), rtol=0, atol=1e-6)
    found = step(layer, x, cache=cache, **given)
    latest = None if cache.max_tokens is None else (cache.max_tokens, cache.sinks)
    torch.testing.assert_close(found, truth.append(x, latest), rtol=0, atol=3e-5)
    assert len(cache) == truth.key.shape[2], "the cache has another length"


def _changed(cache: KVCache, truth: Truth, action: str, size: int, path: Path) -> KVCache:
    """The cache after an action, as the truth."""
    held, batch = truth.key.shape[2], truth.key.shape[0]
    if action == "crop":
        length = max(held - size % 9, 0) if size % 5 else 0
        cache.crop(length)
        if cache.path is not None:
            cache.verify()
        truth.take(lambda tensor: tensor[:, :, :length])
        if not length:
            truth.__init__(truth.layer)
    elif action in ("reorder", "repeat"):
        rows = [size % batch] * batch if action == "repeat" else list(range(batch))[:: 1 - 2 * (size % 2)]
        cache.reorder(rows)
        truth.rows(rows)
    elif action == "edit":
        _edit(cache, truth, held, size)
    anew = made_anew(cache, action, size, path)
    if action in ("copy", "pickle"):
        groups = cache.fixed.tensors if cache.fixed is not None else [group.filled() for group in cache.groups]
        for tensor in (x for tensors in groups for x in tensors):
            tensor.zero_()  # what happens to the former cache changes nothing here
    return anew


def made_anew(cache: Any, action: str, size: int, path: Path) -> Any:
    """The cache after "copy", "pickle" or "save", or unchanged after another action."""
    if action == "copy":
        return copy.deepcopy(cache)
    if action == "pickle":
        return pickle.loads(pickle.dumps(cache))
    if action == "save":
        cache.save(path)
        cache = type(cache).open(path, mode="c" if size % 2 else "r+")
        cache.verify()
    return cache


def refill(fixed: Any, other: Any) -> None:
    """Copies everything that one store of a fixed capacity holds into another, in place."""
    fixed.length.copy_(other.length)
    if other.norms is not None:
        fixed.norms.keys.copy_(other.norms.keys), fixed.norms.values.copy_(other.norms.values)
    for pair, others in zip(fixed.tensors, other.tensors, strict=True):
        pair[0].copy_(others[0]), pair[1].copy_(others[1])


def _edit(cache: KVCache, truth: Truth, held: int, size: int) -> None:
    """Halves a key and negates a value of the last tokens, in place; a bound on scores still holds."""
    if cache.path is not None or cache.fixed is not None or any(cache.forgotten):
        return
    back = 1 + size % min(held, 20)
    members = [[0, 1]] if len(cache.groups) == 1 else [list(x) for x in cache.retention.key_heads]
    for heads, group in zip(members, cache.groups, strict=True):
        if group.length < back or held - back < cache.first.length:
            continue
        key, value, *_ = group.filled()
        key[:, :, -back] *= 0.5
        value[:, :, -back] *= -1.0
        for head in heads:
            truth.key[:, head, held - back] *= 0.5
            truth.value[:, head, held - back] *= -1.0
