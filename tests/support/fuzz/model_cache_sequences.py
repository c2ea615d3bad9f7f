"""Sequences of everything that the cache of a model can do, compared with transformers.

The truth is the model before `patch` with a `DynamicCache`, which gets the same steps by transformers' own code; for forget gates
it is one pass without a cache. A step that a cache refuses must leave it as it was.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from cache_sequences import made_anew, refill
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

from alibi_attn.attention.run import decoding
from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM, patch

VOCABULARY, ROWS, CAPACITY, LAYERS = 50, 2, 400, 2
KINDS: dict[str, Callable[[Path], ALiBiCache]] = {
    "memory": lambda path: ALiBiCache(),
    "file": lambda path: ALiBiCache(path),
    "capacity": lambda path: ALiBiCache(capacity=CAPACITY),
    "gates": lambda path: ALiBiCache(),
    "gates, forget": lambda path: ALiBiCache(forget=True),
}
ACTIONS = (
    *["append"] * 3,
    "crop",
    "reorder",
    "repeat",
    "select",
    "copy",
    "pickle",
    "save",
    "edit",
    "replay",
    "interrupt",
    "reset",
)


class InterruptedPassError(Exception):
    """Ctrl-C in the middle of a pass."""


def models(kind: str) -> tuple[nn.Module, nn.Module | None]:
    """The model under test, and the same before `patch`; None for gates, which transformers does not have."""
    torch.manual_seed(0)
    if kind.startswith("gates"):
        sizes = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = ALiBiCausalLMConfig(
            vocab_size=VOCABULARY, intermediate_size=64, head_norm_eps=1e-6, forget_gate=True, **sizes
        )
        model = ALiBiForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            nn.init.constant_(weight, 0.4) if "q_norm" in name or "k_norm" in name else None
        return model, None
    plain = BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY)).eval()
    model = copy.deepcopy(plain)
    patch(model)
    return model, plain


class Truth:
    """The ids [B, S] of all tokens, which of them may be seen, and their keys and values in a `DynamicCache`."""

    def __init__(self, model: nn.Module, plain: nn.Module | None) -> None:
        self.model, self.plain, self.cache = model, plain, DynamicCache()
        self.ids, self.seen = torch.zeros(ROWS, 0, dtype=torch.int64), torch.zeros(ROWS, 0, dtype=torch.int64)

    def append(self, ids: Tensor, seen: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of new tokens."""
        self.ids, self.seen = torch.cat([self.ids, ids], 1), torch.cat([self.seen, seen], 1)
        given = {"attention_mask": self.seen}
        if self.plain is None:
            return self.model(self.ids, use_cache=False, **given).logits[:, -ids.shape[1] :]
        return self.plain(ids, past_key_values=self.cache, use_cache=True, **given).logits

    def crop(self, length: int) -> None:
        self.cache.crop(length - self.ids.shape[1])
        self.ids, self.seen = self.ids[:, :length], self.seen[:, :length]

    def rows(self, rows: Tensor) -> None:
        if self.plain is not None:
            self.cache.batch_select_indices(rows)
        self.ids, self.seen = self.ids[rows], self.seen[rows]


@torch.no_grad()
def check(kind: str, steps: list[tuple[str, int]], *, near: bool) -> dict[str, int]:
    """Raises an AssertionError unless all logits are the truth's; returns how often each action was not refused.

    Args:
        near: decode by reading near keys only, however few there are.
    """
    (model, plain), done = models(kind), dict.fromkeys(ACTIONS, 0)
    generator = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(decoding, "LONG", 0 if near else 2**60):
        truth, cache = Truth(model, plain), KINDS[kind](Path(folder) / "cache")
        for number, (action, size) in enumerate([*steps, ("append", 1)]):
            held = truth.ids.shape[1]
            if action in ("append", "replay", "interrupt"):
                count = 1 if action == "replay" else 1 + size % (200 if size % 7 == 0 else 5)
                if cache.capacity is not None and held + count > CAPACITY:
                    continue
                ids = torch.randint(VOCABULARY, (truth.ids.shape[0], count), generator=generator)
                if action == "interrupt":
                    done[action] += _interrupted(model, cache, truth, ids)
                else:
                    _append(model, cache, truth, ids, size, replays=action == "replay")
                    done[action] += 1
                continue
            if not held:
                continue
            before = int(cache.get_seq_length()), cache.kept, cache.tokens()
            try:
                cache = _changed(model, cache, truth, action, size, Path(folder) / f"{number}")
                done[action] += 1
            except ValueError:
                after = int(cache.get_seq_length()), cache.kept
                assert after == before[:2], f"a refused {action} has changed the cache"
            ids = cache.tokens()
            assert ids is None or torch.equal(ids, truth.ids), "the cache has other token ids"
    return done


def _append(model: nn.Module, cache: ALiBiCache, truth: Truth, ids: Tensor, size: int, *, replays: bool) -> None:
    seen = torch.ones_like(ids)
    if truth.ids.shape[1] == 0 and ids.shape[1] > 1 and size % 2:
        seen[0, : ids.shape[1] // 2] = 0  # the first row is padded
    mask = torch.cat([truth.seen, seen], 1)
    given = {} if bool(mask.all()) else {"attention_mask": mask}
    if replays and cache.capacity is not None and not given and cache.layers and truth.ids.shape[1]:
        twin = copy.deepcopy(cache)
        expected = model(ids, past_key_values=copy.deepcopy(cache)).logits
        graph = make_fx(lambda token: model(token, past_key_values=twin).logits)(ids)  # it holds the twin's tensors
        for layer, own in zip(twin.layers, cache.layers, strict=True):
            refill(layer.store.fixed, own.store.fixed)
        torch.testing.assert_close(graph(ids), expected, rtol=0, atol=1e-6)
    found = model(ids, past_key_values=cache, use_cache=True, **given).logits
    shown = seen.bool()
    torch.testing.assert_close(found[shown], truth.append(ids, seen)[shown], rtol=0, atol=5e-5)
    assert int(cache.get_seq_length()) == truth.ids.shape[1], "the cache has another length"


def _interrupted(model: nn.Module, cache: ALiBiCache, truth: Truth, ids: Tensor) -> bool:
    """A pass that ends before the second layer; returns whether it could be taken back."""

    def stop(*_: object) -> None:
        raise InterruptedPassError

    layer = model.transformer.h[1] if hasattr(model, "transformer") else model.layers[1]
    kept = copy.deepcopy(cache) if cache.forget else None
    hook = layer.register_forward_pre_hook(stop)
    try:
        model(
            ids, past_key_values=cache, use_cache=True, attention_mask=torch.cat([truth.seen, torch.ones_like(ids)], 1)
        )
    except InterruptedPassError:
        pass
    finally:
        hook.remove()
    try:
        cache.level()
    except ValueError:  # a layer has forgotten keys that earlier tokens need
        assert kept is not None, "a cache that keeps all tokens can take a pass back"
        vars(cache).update(vars(kept))
        return False
    return True


def _changed(model: nn.Module, cache: ALiBiCache, truth: Truth, action: str, size: int, path: Path) -> ALiBiCache:
    """The cache after an action, as the truth."""
    held, batch = truth.ids.shape[1], truth.ids.shape[0]
    if action == "crop":
        length = max(held - 1 - size % 9, 1)
        cache.crop(length - held)
        truth.crop(length)
    elif action == "reset":
        cache.reset()
        truth.__init__(truth.model, truth.plain)
    elif action in ("reorder", "repeat", "select"):
        rows = torch.tensor([size % batch] * batch if size % 3 else list(range(batch))[::-1])
        if action == "repeat":
            rows = torch.arange(batch).repeat_interleave(2 if batch < 4 else 1)
            cache.batch_repeat_interleave(2 if batch < 4 else 1)
        elif action == "select":
            rows = rows[: max(1, batch - 1)]
            cache.batch_select_indices(rows)
        else:
            cache.reorder_cache(rows)
        truth.rows(rows)
    elif action == "edit" and truth.plain is not None and cache.path is None and cache.capacity is None:
        layer, other, at = cache.layers[size % LAYERS], truth.cache.layers[size % LAYERS], size % held
        for mine, theirs, factor in ((layer.keys, other.keys, 0.5), (layer.values, other.values, -1.0)):
            mine[:, :, at] *= factor
            theirs[:, :, at] *= factor
        if size % 3 == 0:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return made_anew(cache, action, size, path)
