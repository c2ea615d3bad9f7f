"""ALiBiCache: a cache for `generate` in which a new token of a patched model reads only the keys within reach.

A `DynamicCache` of transformers copies all keys and values for every new token, and attention then scores all of them. This
cache appends in place and stores norms of its keys and values: see `attention/decoding.py`.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.hf.caches import cache_folder
from alibi_attn.hf.caches.cache_folder import TokenIds
from alibi_attn.hf.caches.cache_layer import NEEDS_PATCH, CacheLayer
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.cache_checks import check_format
from alibi_attn.nn.cache_header import Mode, check_new

FORMAT = 1  # of a pickle; the KVCaches inside have their own format number


class ALiBiCache(Cache):
    """Pass a new one as `past_key_values`: `model.generate(tokens, past_key_values=ALiBiCache())`.

    It replaces a `DynamicCache` in any model (beams, assisted generation, chunks, cropping), with the same outputs. In
    a patched model, the cost of attention per token then depends on the reach and not on the length of the text; with
    padding, the cost of each row depends only on its own tokens. All keys are still scored if the mask has holes,
    gradients are needed, numerics is not "exact", a `backend` is named, or under `torch.compile`; on a GPU also with
    any padding. On a CPU without a compiler, in fp64, or with a head size that is not a multiple of 16, all keys are
    scored below 2²³ cached elements per layer and sequence (8,192 tokens of 16 heads × 64).

    It can be copied and pickled. A pickle names its format and contains no transformers classes, so it survives upgrades.

    With a `path` it is a folder of memory-mapped files, on Linux and macOS: memory then follows the keys that queries read, and
    `ALiBiCache.open(path)` continues later, also after the process was killed (not after a power failure). This needs a patched
    model or one of our models, on the CPU, without gradients. Copies and pickles of it are in memory.
    See `docs/long-texts.md`.

    MPT's config has `use_cache=False`: pass `use_cache=True` to `generate`.

    Args:
        path: a new folder; None = memory.

    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> from alibi_attn.hf import patch
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)).eval()
    >>> cache = ALiBiCache()
    >>> with patch(model):
    ...     tokens = model.generate(torch.ones(1, 9, dtype=torch.int64), past_key_values=cache, max_new_tokens=3, pad_token_id=0)
    >>> cache.get_seq_length()
    11
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(layer_class_to_replicate=CacheLayer)
        self.path = None if path is None else Path(path)
        self._about: dict[str, Any] | None = None  # description of the model; None before the first forward pass
        self._model: weakref.ref[nn.Module] | None = None  # the model that filled the cache
        # The model that was compared with the description, and how often its weights had been written to.
        self._checked: tuple[weakref.ref[nn.Module], int] | None = None
        self._ids = TokenIds()
        if self.path is not None:
            check_new(self.path)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mode: Mode = "r+") -> Self:
        """The cache in a folder. Headers and norms are checked; only `verify()` notices a bit flipped in a key or a value.

        Args:
            mode: "r+" continues the files. "c" shares them: any number of processes may open them. Their changes are
                private and never saved.

        Raises:
            OSError: there is no such cache.
            ValueError: a file is damaged, has another format, or is open elsewhere.
        """
        cache = cls()
        cache.path = Path(path)
        cache._about = cache_folder.read_description(cache.path)
        for index in range(cache._about["layers"]):
            cache.layers.append(CacheLayer(store=cache_folder.open_layer(cache.path, cache._about, index, mode)))
        tokens = cache_folder.token_path(cache.path)
        if mode == "r+":
            tokens.touch()
        memory = None if mode == "r+" else tokens.read_bytes()
        cache._ids = TokenIds(tokens, memory=memory, identity=cache._about["id"])
        cache.level()
        return cache

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a copy to a new folder, which `open` reads.

        Raises:
            OSError: the folder cannot be written.
            ValueError: it exists, the cache is empty, or its model or token ids are unknown.
        """
        target = Path(path)
        check_new(target)
        model = None if self._model is None else self._model()
        about = self._about or (None if model is None else cache_folder.describe(model))
        tokens = self.tokens()
        if about is None or tokens is None:
            raise ValueError(
                "only a cache whose model and token ids are known can be saved: one that a patched model or an "
                "ALiBiForCausalLM filled from input_ids, and that was not copied, reordered or changed since"
            )
        about = cache_folder.identified(about)
        with cache_folder.created(target, about) as folder:
            TokenIds(cache_folder.token_path(folder), identity=about["id"]).write(0, tokens)
            for index, layer in enumerate(self._held):
                layer.store.save(cache_folder.layer_path(folder, index), part=cache_folder.part(about, index))

    def verify(self) -> None:
        """Compares all token ids, keys and values in the files with their checksums; `open` checks the rest.

        Raises:
            ValueError: some differ or are missing, or the cache has no files.
        """
        if self.path is None:
            raise ValueError("the cache is in memory and has no checksums; verify() is for ALiBiCache.open(path)")
        if self.get_seq_length() > 0 and self.tokens() is None:
            tokens = cache_folder.token_path(self.path)
            raise ValueError(f"the token ids of the cache are damaged: {tokens} is too short; read the text again")
        for layer in self._held:
            layer.store.verify()

    def begin(self, model: nn.Module, tokens: Tensor | None) -> None:
        """Called by patched and our own models before a forward pass: checks the model, records token ids [B, T]."""
        if torch.compiler.is_compiling():
            return
        if self._model is None or self.get_seq_length() == 0:
            self._model = weakref.ref(model)
        if self.path is not None:
            if tokens is None or tokens.device.type != "cpu":
                raise ValueError("a cache in files stores token ids; pass input_ids on the CPU, not inputs_embeds")
            if self._about is None:
                self._create(model)
            self.check_model(model)
        self.level()
        if tokens is None or tokens.device.type != "cpu":
            self._ids.forget()
        else:
            self._ids.write(self.get_seq_length(), tokens)

    def check_model(self, model: nn.Module) -> None:
        """Raises ValueError if a model with other weights wrote the files; `model` is the model without its head."""
        writes = cache_folder.writes(model)
        if self._about is None or (
            self._checked is not None and self._checked[0]() is model and self._checked[1] == writes
        ):
            return
        about = {**self._about, **cache_folder.describe(model)}
        if self._about != about:
            raise ValueError(
                f"{self.path} was written by a model with other weights, slopes or layers ({self._about['layers']} layers, "
                f"fingerprint {self._about['fingerprint'][:12]}) than this one ({about['layers']}, {about['fingerprint'][:12]}); "
                "pass the model that wrote it, or read the text into a new cache"
            )
        self._checked = weakref.ref(model), writes

    def tokens(self) -> Tensor | None:
        """The ids of the cached tokens, [B, S] int64; None if they are unknown, also after keys or values were changed."""
        length = self.get_seq_length()
        if length == 0 or any(layer.store.notice_changes() for layer in self._held):
            return None
        return self._ids.read(self._held[0].store.key.shape[0], length)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """(keys, values, None) of each layer, as for a `DynamicCache`."""
        for layer in self._held:
            yield layer.keys, layer.values, None

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """The number of tokens in a layer; None = in all layers, which differ after a forward pass was interrupted."""
        if layer_idx is not None:
            return len(self._held[layer_idx].store) if layer_idx < len(self.layers) else 0
        model = None if self._model is None else self._model()
        if model is not None and len(self.layers) < model.config.num_hidden_layers:  # type: ignore[operator, union-attr]
            return 0
        return min((len(layer.store) for layer in self._held), default=0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def level(self) -> None:
        """Removes the tokens that only some layers hold, after a forward pass was interrupted."""
        least = self.get_seq_length()
        for layer in self._held:
            if len(layer.store) > least:
                layer.store.crop(least)

    def __repr__(self) -> str:
        nbytes = sum(layer.store.nbytes for layer in self._held)
        place = "in memory" if self.path is None else f"in {self.path}"
        return f"ALiBiCache({self.get_seq_length()} tokens, {len(self.layers)} layers, {nbytes} bytes {place})"

    def __getstate__(self) -> dict[str, object]:
        return {"format": FORMAT, "stores": [layer.store for layer in self._held]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_format("ALiBiCache", state, reads=FORMAT)
        ALiBiCache.__init__(self)
        self.layers = [CacheLayer(store=store) for store in state["stores"]]

    def norms(self, layer_idx: int) -> Norms:
        """Norms of the cached keys and values of one layer, which must not be empty."""
        return self._held[layer_idx].store.norms

    def log_fgate(self, layer_idx: int) -> Tensor:
        """ln of the forget gates of one layer, [B, H, S]."""
        gates = self._held[layer_idx].store.log_fgate
        assert gates is not None
        return gates

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by attention layers: appends keys and values; returns all keys and values of the layer.

        Raises:
            ValueError: the first pass of a model without `patch` was interrupted, and this layer has not seen its tokens.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(self._new_layer())
        if layer_idx == 0 and "layer" not in kwargs:  # else `begin` did
            self.level()
        pair = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        first, length = len(self._held[0].store), len(self._held[layer_idx].store)
        if first not in (0, length):
            raise ValueError(
                f"layer 0 of this cache holds {first} tokens and layer {layer_idx} holds {length}, because an earlier pass was "
                "interrupted; call reset() and pass the text again"
            )
        return pair

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._forget_ids()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._forget_ids()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._forget_ids()

    def appendable(self, owners: Sequence[nn.Module | None]) -> list[KVCache] | None:
        """The caches of all layers if `KVCache.extend` may append to them for these attention layers; else None."""
        if not self.layers or len(self.layers) != len(owners):
            return None
        pairs = list(zip(self._held, owners, strict=True))
        if self.path is not None:  # `begin` has compared the model
            for layer, owner in pairs:
                layer.owner = weakref.ref(owner) if layer.owner is None and owner is not None else layer.owner
        if any(layer.owner is None or layer.owner() is not owner for layer, owner in pairs):
            return None
        stores = [layer.store for layer in self._held]
        lengths = {len(store) for store in stores}
        return stores if len(lengths) == 1 and all(store.can_extend for store in stores) else None

    def _new_layer(self) -> CacheLayer:
        if self.path is None:
            return CacheLayer()
        if self._about is None:
            raise ValueError(NEEDS_PATCH)
        return CacheLayer(store=cache_folder.open_layer(self.path, self._about, len(self.layers), "r+"))

    def _forget_ids(self) -> None:
        if self.path is None:  # else only calls that leave all rows in place are allowed
            self._ids.forget()

    def _create(self, model: nn.Module) -> None:
        assert self.path is not None
        about = cache_folder.identified(cache_folder.describe(model))
        with cache_folder.created(self.path, about):
            pass
        self._ids = TokenIds(cache_folder.token_path(self.path), identity=about["id"])
        self._about, self._checked = about, (weakref.ref(model), cache_folder.writes(model))

    @property
    def _held(self) -> list[CacheLayer]:
        return cast("list[CacheLayer]", self.layers)
