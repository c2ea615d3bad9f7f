"""How a KVCache appends tokens to its storage, and what it checks before. Read before: `cache.py`."""

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alibi_attn.attention.call.spec import index_of
from alibi_attn.attention.call.transforms import may_read
from alibi_attn.attention.kept import Kept
from alibi_attn.nn.cache.file import CacheFile
from alibi_attn.nn.cache.header import check_new, fingerprint
from alibi_attn.nn.cache.refusals import described, refuse
from alibi_attn.nn.cache.retention import TOGETHER, Certified, drop_by_gates
from alibi_attn.nn.cache.storage import Growing

if TYPE_CHECKING:
    from alibi_attn.nn.cache.cache import KVCache


def traits(cache: "KVCache") -> list[str]:
    """How the cache stores and forgets, in the words of `refusals.REFUSED`."""
    found = [name for name in ("path", "capacity", "max_tokens") if vars(cache)[name] is not None]
    if cache.retention is not None:
        found.append("forgetting by gates" if cache.retention.limits is None else "reach")
    return found


def held(cache: "KVCache") -> list[tuple[Tensor, ...]]:
    """The tensors of each group of heads, with spare capacity."""
    return [group.tensors for group in cache.groups] if cache.fixed is None else [*cache.fixed.tensors]


def pieces(cache: "KVCache", count: int) -> list[int]:
    """The numbers of tokens of the appends that add `count`: those that fit a stream, then each replaces one."""
    if cache.max_tokens is None:
        return [count]
    fits = max(cache.max_tokens - len(cache), 1)
    return [min(fits, count)] + [1] * (count - fits)


def check_append(
    cache: "KVCache", key: Tensor, value: Tensor, log_fgate: Tensor | None, layer: nn.Module | None
) -> None:
    compiling, grad = torch.compiler.is_compiling(), torch.is_grad_enabled()
    if not (layer is None or cache._layer is None or compiling or cache._layer() is layer):
        raise ValueError("this KVCache belongs to another attention layer; make one KVCache() for each layer")
    if how := traits(cache):
        needs = ["gradients"] if grad and (cache.path is not None or key.requires_grad or value.requires_grad) else []
        needs += ["torch.compile"] * compiling + ["no forget gates" if log_fgate is None else "forget gates"]
        refuse(*how, *needs)
    groups = held(cache) if torch.compiler.is_exporting() else []
    if groups and groups[0] and (cache._layer is not None or type(groups[0][0]) is Tensor is not type(key)):
        raise ValueError(
            "torch.export does not record writes to a cache that held tokens before; make the cache inside the exported "
            "function, or replay steps by torch.compile or a CUDA graph"
        )
    check_tensors(cache, key, value, log_fgate)


def check_tensors(cache: "KVCache", key: Tensor, value: Tensor, log_fgate: Tensor | None) -> None:
    """Raises ValueError unless key and value are [B, K, T, D], gates [B, H, T], and they continue the cached ones."""
    retention, (cached, *_) = cache.retention, (*held(cache), ())
    length = cache.groups[0].length if cache.groups else 0
    heads, queries = (None, None) if retention is None else (retention.num_kv_heads, retention.num_heads)
    if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3] or heads not in (None, key.shape[1]):
        wanted = "" if heads is None else f" with K = {heads}"
        raise ValueError(
            f"key has shape {list(key.shape)} and value {list(value.shape)} but both must be [B, K, T, D]{wanted}"
        )
    for name, new, old in zip(("key", "value"), (key, value), cached, strict=False):
        (batch, of_new, _, size), (of_batch, of_old, _, of_size) = new.shape, old.shape
        fits = batch == of_batch and size == of_size and of_new == (heads or of_old)
        if not (fits and new.dtype == old.dtype and new.device == old.device):
            raise ValueError(
                f"{name} is {described(new)} but the cache holds {described(old, length)}: only the length may differ; a new "
                "batch needs a new KVCache()"
            )
    if cached and (log_fgate is None) == (len(cached) > 2):
        with_gates = "gates" if len(cached) > 2 else "no gates"
        raise ValueError(f"the cache holds keys with {with_gates}: pass log_fgate for every token or for none")
    fits = log_fgate is None or (log_fgate.ndim == 3 and log_fgate.shape[::2] == (key.shape[0], key.shape[2]))
    if log_fgate is not None and not (fits and queries in (None, log_fgate.shape[1])):
        raise ValueError(
            f"log_fgate has shape {list(log_fgate.shape)} but must be [B, H, T] = [{key.shape[0]}, {queries or 'H'}, "
            f"{key.shape[2]}] to match key's {list(key.shape)}"
        )


def checked_scores(
    cache: "KVCache", retention: Certified, query: Tensor, key: Tensor, slopes: Tensor, scale: float | None
) -> float:
    """The norm of the longest key so far, where tensors can be read.

    Raises:
        ValueError: a query [B, H, T, D] and a key [B, K, T, D] could score above the bound, or slopes [H] fell.
    """
    if not query.numel() or not may_read(query, key, slopes):
        return cache._longest_key
    if retention.slopes and any(now < then for now, then in zip(slopes.tolist(), retention.slopes, strict=True)):
        raise ValueError(
            f"the slopes are {slopes.tolist()} but this cache forgot keys for {list(retention.slopes)}; create a new one after "
            "slopes fall"
        )
    changed = [group.filled()[0] for group in cache.groups if group.length] if cache.notice_changes() else []
    of_query, *of_keys = (float(x.detach().float().norm(dim=-1).max()) for x in (query, key, *changed))
    longest = max(*of_keys, cache._longest_key)  # NaN stays NaN in this order
    largest = abs(query.shape[3] ** -0.5 if scale is None else scale) * of_query * longest
    if not largest <= retention.score_bound:
        raise ValueError(
            f"scores may reach {largest:.6g} but this cache forgot keys for scores up to {retention.score_bound:.6g}; "
            "create it with a larger score_bound, and a new one after the weights change"
        )
    return longest


def to_all(cache: "KVCache", new: tuple[Tensor, ...], layer: nn.Module | None) -> list[Kept]:
    """All heads keep the same tokens."""
    count, most = new[0].shape[2], cache.max_tokens
    group = cache.groups[0] if cache.groups else Growing()
    weights = fingerprint(layer) if cache.path is not None and cache._layer is None and layer is not None else ""
    if group.file is not None and weights and group.file.fingerprint not in ("", weights):
        raise ValueError(
            f"{cache.path} was written with other weights or settings; pass the layer that wrote it, or a new cache"
        )
    if cache.path is not None and group.file is None:
        check_new(cache.path)
        group = Growing(file=CacheFile.write(cache.path, new[0], new[1], fingerprint=weights, part=cache.part))
        filled = group.filled()
    elif most is not None and group.length + count > most:
        if count > 1:
            raise ValueError(
                f"{count} tokens do not fit after {group.length} of at most {most}: "
                "append those that fit, then one at a time"
            )
        filled = group.replace_oldest(cache.sinks, new)
    else:
        filled = group.append(new, with_room=most is None)
    cache.groups = [group]
    key, value, *gates = filled
    norms = None if most is not None else group.norms
    log_fgate = gates[0][..., 0] if gates else None
    return [Kept(key, value, first=group.length - count, norms=norms, log_fgate=log_fgate)]


def to_groups(cache: "KVCache", retention: Certified, new: tuple[Tensor, ...]) -> list[Kept]:
    """Each group of heads forgets what its later queries do not need, then keeps the new tokens."""
    count, past = new[0].shape[2], len(cache)
    cache.groups = cache.groups or [Growing() for _ in retention.heads]
    for group, limit in zip(cache.groups, retention.limits or (), strict=retention.limits is not None):
        if group.length >= limit:  # of several new queries, the first needs the most keys
            group.drop(group.length - limit + 1)
    if retention.limits is None and any(cache.forgotten) and cache.notice_changes():
        raise ValueError(
            "keys, values or gates of this cache were changed after tokens had been forgotten, which may now be needed; "
            "create a new cache and pass the text again"
        )
    if retention.limits is None and cache._since >= TOGETHER:
        cache._gone = cache._gone or [None] * len(cache.groups)
        drop_by_gates(retention, cache.groups, cache._gone, cache._since)
        cache._since = 0
    cache._since += count
    if (more := retention.sinks - cache.first.length) > 0:
        cache.first.append(tuple(x[:, :, :more] for x in new))
    kept = []
    for group, members, own in zip(cache.groups, retention.key_heads, retention.heads, strict=True):
        of_keys, index = index_of(list(members)), index_of(own)
        some = zip(new, (of_keys, of_keys, index), strict=False)
        key, value, *gates = group.append(new if len(cache.groups) == 1 else tuple(x[:, heads] for x, heads in some))
        # The sinks among the keys of the group are counted once.
        repeated = max(cache.first.length - group.dropped, 0)
        log_fgate, select = gates[0][..., 0] if gates else None, index if isinstance(index, slice) else None
        key, value, at = key[:, :, repeated:], value[:, :, repeated:], group.length - repeated - count
        kept.append(Kept(key, value, own, at, log_fgate=log_fgate, select=select))
        if cache.first.length:
            first = [x[:, of_keys] for x in cache.first.filled()]
            kept.append(Kept(first[0], first[1], own, past, select=select))
    return kept


def checked_crop(cache: "KVCache", length: int | Tensor) -> int:
    """The length as an int; raises ValueError if the cache does not hold it, or needs forgotten tokens then."""
    length, tokens = operator.index(length), len(cache)
    if not 0 <= length <= tokens:
        raise ValueError(f"length is {length} but the cache holds {tokens} positions: crop to 0 … {tokens}")
    limits = None if cache.retention is None else cache.retention.limits
    if length in (0, tokens):
        return length
    if limits is None and any(cache.forgotten):
        raise ValueError(
            f"the cache has forgotten {max(cache.forgotten)} tokens, so cropping to {length} would leave out some that a "
            "cache of that length holds; crop(0) empties it"
        )
    left = [max(group.length - tokens + length, 0) for group in cache.groups]
    if any(count < min(length, limit - 1) for count, limit in zip(left, limits or (), strict=limits is not None)):
        raise ValueError(
            f"cropped to {length} of {tokens} tokens the cache would need keys that it has forgotten; "
            "undo drafts before the next append, or crop(0) to empty it"
        )
    return length
