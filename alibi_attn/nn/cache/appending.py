"""How a KVCache appends tokens to its storage, and what it checks before. Read before: `cache.py`."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alibi_attn.attention.call.spec import index_of
from alibi_attn.attention.call.transforms import may_read
from alibi_attn.attention.kept import Kept
from alibi_attn.nn.cache import refusals
from alibi_attn.nn.cache.file import CacheFile
from alibi_attn.nn.cache.header import check_new, fingerprint
from alibi_attn.nn.cache.refusals import refuse
from alibi_attn.nn.cache.retention import TOGETHER, Certified, drop_by_gates, drop_unreachable
from alibi_attn.nn.cache.storage import Growing

if TYPE_CHECKING:
    from alibi_attn.nn.cache.cache import KVCache


def traits(cache: "KVCache") -> list[str]:
    """How the cache stores and forgets, in the words of `refusals.REFUSED`."""
    found = [name for name in ("path", "capacity", "max_tokens") if vars(cache)[name] is not None]
    if cache.retention is not None:
        found.append("forgetting by gates" if cache.retention.limits is None else "reach")
    return found


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
    storages = cache.groups if cache.fixed is None else cache.fixed.tensors
    cached = () if not storages else storages[0].tensors if isinstance(storages[0], Growing) else storages[0]
    certified, length = cache.retention, cache.groups[0].length if cache.groups else 0
    refusals.check_pair(key, value, cached, length, heads=None if certified is None else certified.num_kv_heads)
    gated = len(cached) > 2 if cached and cache.fixed is None else None
    refusals.check_gates(key, log_fgate, num_heads=None if certified is None else certified.num_heads, gated=gated)


def checked_scores(
    cache: "KVCache", retention: Certified, query: Tensor, key: Tensor, slopes: Tensor, scale: float | None
) -> float:
    """The norm of the longest key so far, compared with the bound where tensors can be read."""
    if not query.numel() or not may_read(query, key, slopes):
        return cache._longest_key
    longest = cache._longest_key
    if cache.notice_changes():
        kept = [group.filled()[0].detach().float().norm(dim=-1).max() for group in cache.groups if group.length]
        longest = max([longest, *map(float, kept)])
    return retention.check_scores(query, key, query.shape[3] ** -0.5 if scale is None else scale, slopes, longest)


def to_all(cache: "KVCache", new: tuple[Tensor, ...], layer: nn.Module | None) -> list[Kept]:
    """All heads keep the same tokens."""
    count, most = new[0].shape[2], cache.max_tokens
    group = cache.groups[0] if cache.groups else Growing()
    filled: tuple[Tensor, ...] = ()
    if cache.path is not None:
        group = _to_file(cache, group, new, layer)
    elif most is not None and group.length + count > most:
        if count > 1:
            raise ValueError(
                f"{count} tokens do not fit after {group.length} of at most {most}: "
                "append those that fit, then one at a time"
            )
        group.replace_oldest(cache.sinks, new)
    else:
        filled = group.append(new, with_room=most is None)
    cache.groups = [group]
    if most is not None:
        cache._seen += count
    key, value, *gates = filled or group.filled()
    norms = None if most is not None else group.norms
    log_fgate = gates[0][..., 0] if gates else None
    return [Kept(key, value, first=group.length - count, norms=norms, log_fgate=log_fgate)]


def _to_file(cache: "KVCache", group: Growing, new: tuple[Tensor, ...], layer: nn.Module | None) -> Growing:
    assert cache.path is not None
    weights = cache._weights
    if weights is None:
        weights = "" if layer is None else fingerprint(layer)
        if group.file is not None:
            group.file.check_weights(weights)
    if group.file is None:
        check_new(cache.path)
        group = Growing(file=CacheFile.write(cache.path, *new, fingerprint=weights, part=cache.part))
    else:
        group.append(new)
    cache._weights = weights
    return group


def to_groups(cache: "KVCache", retention: Certified, new: tuple[Tensor, ...]) -> list[Kept]:
    """Each group of heads forgets what its later queries do not need, then keeps the new tokens."""
    count, heads = new[0].shape[2], retention.heads
    if not cache.groups:
        cache.groups = [Growing() for _ in heads]
    if retention.limits is not None:
        drop_unreachable(cache.groups, retention.limits)
    elif any(cache.forgotten) and cache.notice_changes():
        raise ValueError(
            "keys, values or gates of this cache were changed after tokens had been forgotten, which may now be needed; "
            "create a new cache and pass the text again"
        )
    elif cache._since >= TOGETHER:
        cache._gone = cache._gone or [None] * len(heads)
        for group in cache.groups:
            group.changed = False  # what is dropped now follows from the tensors as they are
        drop_by_gates(retention, cache.groups, cache._gone, cache._since)
        cache._since = 0
    cache._seen, cache._since = cache._seen + count, cache._since + count
    if (more := retention.sinks - cache.first.length) > 0:
        cache.first.append(tuple(x[:, :, :more] for x in new))
    kept = []
    for group, members, own in zip(cache.groups, retention.key_heads, heads, strict=True):
        some = [index_of(list(members)), index_of(list(members)), index_of(own)][: len(new)]
        group.append(new if len(heads) == 1 else tuple(x[:, index] for x, index in zip(new, some, strict=True)))
        key, value, *gates = group.filled()
        # The sinks among the keys of the group are counted once.
        repeated = max(cache.first.length - cache._seen + group.length, 0)
        index, log_fgate = index_of(own), gates[0][..., 0] if gates else None
        near = Kept(
            key[:, :, repeated:],
            value[:, :, repeated:],
            own,
            group.length - repeated - count,
            log_fgate=log_fgate,
            select=index if isinstance(index, slice) else None,
        )
        kept.append(near)
        if cache.first.length:
            first = [x[:, some[0]] for x in cache.first.filled()]
            kept.append(Kept(first[0], first[1], own, cache._seen - count, select=near.select))
    return kept
