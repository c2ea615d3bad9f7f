"""GatedReachCache: permanently forgets keys once the gates prove that no later query can need them.

Slopes determine a static reach (`reach_cache.py`) before any text exists; gates forget by content. See `docs/maths.md`,
step 12. Shapes as in `attention/call/spec.py`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from alibi_attn.attention.call.bias import widest
from alibi_attn.attention.certificate.biased import sums_behind
from alibi_attn.nn.reach_cache import CachesOfHeads

TOGETHER = 64  # tokens between two computations of the keys that may be forgotten


class GatedReachCache(CachesOfHeads):
    """The keys, values and gates that later queries can still need; `len(cache)` is the number of tokens seen.

    At time t a dropped key at l weighs, for any later query of head h, at most e^(2U + c_t − c_l − m·(t − l)) times the
    query's own key, where c is the sum of ln f. This bound only decreases with time. The oldest keys are dropped as
    long as all keys ever dropped together weigh at most ε, for every query head that reads them and in every sequence
    of the batch.

    Args:
        slopes: [H], none of them negative.
        num_kv_heads: K, which divides H.
        score_bound: U; `ALiBiAttention` raises an error if queries and keys exceed it (if it can read them).
        tolerance: ε, the largest share of a later query's softmax mass that is forgotten.

    Raises:
        ValueError: a slope is negative, so that far keys gain weight; or num_kv_heads does not divide the number of heads.
    """

    def __init__(
        self, slopes: Sequence[float] | Tensor, *, score_bound: float, tolerance: float, num_kv_heads: int
    ) -> None:
        self.slopes = torch.as_tensor(slopes, dtype=torch.float32).tolist()  # as attention computes with them
        if min(self.slopes) < 0:
            raise ValueError(
                f"slopes are {self.slopes} but must not be negative, or keys would gain weight over time; use KVCache()"
            )
        if num_kv_heads < 1 or len(self.slopes) % num_kv_heads:
            raise ValueError(f"num_kv_heads is {num_kv_heads} but must divide the {len(self.slopes)} heads of slopes")
        key_heads = [[k] for k in range(num_kv_heads)]
        super().__init__(key_heads, len(self.slopes), score_bound=score_bound, tolerance=tolerance)
        self._gone: list[Tensor | None] = [None] * num_kv_heads  # [B, group] ln of the weight of dropped keys
        self._since = 0  # tokens since the last time some were dropped

    def append(
        self, key: Tensor, value: Tensor, log_fgate: Tensor, *, layer: nn.Module | None = None
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Add key and value, [B, K, T, D], and ln f, [B, H, T]; returns the keys and values [B, 1, S', D] and gates
        [B, H / K, S'] of each key head that these T queries need; the last T positions are the new ones.

        Raises:
            ValueError: the layer differs, or shapes, dtype or device do not match the cache.
        """
        self._check_pair(key, value)
        wanted = [key.shape[0], len(self.slopes), key.shape[2]]
        if list(log_fgate.shape) != wanted:
            raise ValueError(f"log_fgate has shape {list(log_fgate.shape)} but must be [B, H, T] = {wanted}")
        if any(self.forgotten) and self._notice_changes():
            raise ValueError(
                "keys, values or gates of this cache were changed after tokens had been forgotten, which may now be needed; "
                "create a new cache and pass the text again"
            )
        if self._since >= TOGETHER:
            self._forget()
        parts = []
        for k, cache in enumerate(self._caches):
            gates = log_fgate[:, self.query_heads[k]]
            of_head = cache.append(key[:, k : k + 1], value[:, k : k + 1], layer=layer, log_fgate=gates)
            assert cache.log_fgate is not None
            parts.append((*of_head, cache.log_fgate))
        self._seen += key.shape[2]
        self._since += key.shape[2]
        return parts

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; after something was forgotten, only 0 (empty) or all.

        Raises:
            ValueError: `length` exceeds the tokens seen, or later tokens have caused others to be forgotten.
        """
        length = self._checked_length(length)
        if 0 < length < self._seen and any(self.forgotten):
            raise ValueError(
                f"the cache has forgotten {list(self.forgotten)} tokens, as later gates allowed, and cannot return to fewer; "
                "crop(0) empties it"
            )
        for cache in self._caches:
            cache.crop(min(length, len(cache)))
        if length == 0:
            self._gone, self._longest_key = [None] * len(self._caches), 0.0
        self._seen, self._since = length, min(self._since, length)

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Same as `KVCache.reorder`."""
        super().reorder(indices)
        self._gone = [x if x is None else x[torch.as_tensor(indices, device=x.device)] for x in self._gone]

    @torch.no_grad()
    def _forget(self) -> None:
        """Drop the oldest keys of every key head that may be dropped, and update the weight of those dropped before."""
        room = math.log(self.tolerance) - 2 * self.score_bound if self.tolerance > 0 else -math.inf
        for k, cache in enumerate(self._caches):
            gates = cache.log_fgate
            assert gates is not None
            gates = gates if widest(gates) == torch.float64 else gates.cpu()
            slopes = torch.tensor(
                [self.slopes[h] for h in self.query_heads[k]], dtype=torch.float64, device=gates.device
            )
            # ln of the product of the gates after each key, and m·(t − l): [B, group, S'].
            steps = gates.double() - slopes[:, None]
            behind = sums_behind(steps)
            gone = self._gone[k]
            if gone is None:
                gone = torch.full_like(behind[..., 0], -math.inf)
            gone = gone + steps[..., steps.shape[-1] - self._since :].sum(-1)
            total = torch.logaddexp(behind.logcumsumexp(-1), gone[..., None])
            # Sums over 10⁶ keys in fp64 are off by 10⁻⁹ at most.
            count = int((total <= room - 1e-6).all(0).all(0).cumprod(-1).sum())
            count = min(count, len(cache) - 1)  # the newest token is always kept
            self._gone[k] = total[..., count - 1] if count else gone
            cache.forget(len(cache) - count)
        self._since = 0
