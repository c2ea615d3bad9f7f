"""ALiBiCache: a cache for `generate` in which a new token of a patched model reads only the keys within reach.

A `DynamicCache` of transformers copies all keys and values for every new token, and attention then scores all of them. This
cache is a list of `KVCache`, one per layer, which append in place and store norms: see `nn/cache/cache.py`.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from alibi_attn.attention.call.transforms import may_read
from alibi_attn.attention.kept import Kept
from alibi_attn.hf.caches import cache_folder
from alibi_attn.hf.caches.cache_folder import TokenIds
from alibi_attn.hf.caches.layer import FOR_GATES, NEEDS_PATCH, CacheLayer, cut_after_padding
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.cache.header import Mode, check_new
from alibi_attn.nn.cache.refusals import check_format, refuse
from alibi_attn.nn.cache.storage import Growing

FORMAT, FORMAT_OF_CHOICES = 1, 2  # of pickles; the KVCaches inside have their own


class ALiBiCache(Cache):
    """Pass a new one as `past_key_values`: `model.generate(tokens, past_key_values=ALiBiCache())`.

    It replaces a `DynamicCache` in any model (beams, assisted generation, chunks, cropping), with the same outputs. In
    a patched model, the cost of attention per token then depends on the reach and not on the length of the text; with
    padding, the cost of each row depends only on its own tokens. All keys are still scored if the mask has holes,
    gradients are needed, numerics is not "exact", a `backend` is named, or under `torch.compile`; on a GPU also with
    any padding. On a CPU without a compiler, in fp64, or with a head size that is not a multiple of 16, all keys are
    scored below 2²³ cached elements per layer and sequence (8,192 tokens of 16 heads × 64).

    A pickle of it names its format and contains no transformers classes, so it survives upgrades.
    With a `path` it is a folder of memory-mapped files, on Linux and macOS: memory then follows the keys that queries read, and
    `ALiBiCache.open(path)` continues later, also after the process was killed (not after a power failure). This needs a patched
    model or one of our models, on the CPU, without gradients. Copies and pickles are in memory. See `docs/long-texts.md`.

    With a `capacity` the length is a tensor, as in transformers' `StaticCache`, so that a CUDA graph replays a decoding step:
    call the model once before capturing a step. After more than `capacity` tokens all outputs are NaN; `reset()` begins a new
    text. With an attention mask, under torch.compile, or on a CPU, a step scores all keys up to its position.

    With `forget=True` each key head of a Forgetting Transformer with normalized queries and keys (`qk_norm`) drops the keys that
    its gates prove unnecessary for every later token (`docs/certificate.md`, step 12). Logits are those of `ALiBiCache()` within
    the tolerance. It supports left padding, beams and chunks, but cannot return to fewer tokens, as assisted generation does.
    Rows of similar length and padding keep the fewest keys.

    MPT's config has `use_cache=False`: pass `use_cache=True` to `generate`.

    Args:
        path: a new folder; None = memory.
        capacity: the largest number of tokens; None = the cache grows.
        forget: drop keys that no later token needs.
        tolerance: the largest share of a later query's softmax mass that is forgotten; None = eps / 32 of the dtype.

    Raises:
        ValueError: choices that exclude one another (`docs/caches.md`), or a tolerance outside [0, 1).

    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> from alibi_attn.hf import patch
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)).eval()
    >>> cache = ALiBiCache()
    >>> with patch(model):
    ...     tokens = model.generate(torch.ones(1, 9, dtype=torch.int64), past_key_values=cache, max_new_tokens=3, pad_token_id=0)
    >>> cache.get_seq_length()
    11
    """

    layers: list[CacheLayer]  # type: ignore[assignment]

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        capacity: int | None = None,
        forget: bool = False,
        tolerance: float | None = None,
    ) -> None:
        if tolerance is not None and not 0.0 <= tolerance < 1.0:
            raise ValueError(f"tolerance is {tolerance} but is a share of softmax mass in [0, 1)")
        choices = {"path": path is not None, "capacity": capacity is not None, "forgetting by gates": forget}
        refuse(*(name for name, chosen in choices.items() if chosen))
        KVCache(capacity=capacity)  # checks the number
        self.capacity, self.forget, self.tolerance = capacity, forget, tolerance
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
            cache.layers.append(CacheLayer(cache_folder.open_layer(cache.path, cache._about, index, mode)))
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
        with cache_folder.created(target, about) as (folder, about):
            TokenIds(cache_folder.token_path(folder), identity=about["id"]).write(0, tokens)
            for index, layer in enumerate(self.layers):
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
        for layer in self.layers:
            layer.store.verify()

    def begin(self, model: nn.Module, tokens: Tensor | None) -> None:
        """Called by patched and our own models before a forward pass: checks the model, records token ids [B, T]."""
        if torch.compiler.is_compiling():
            return
        if self._model is None or (self.capacity is None and self.get_seq_length() == 0):
            self._model = weakref.ref(model)
        if self.path is not None:
            if tokens is None or tokens.device.type != "cpu":
                raise ValueError("a cache in files stores token ids; pass input_ids on the CPU, not inputs_embeds")
            if self._about is None:
                with cache_folder.created(self.path, cache_folder.describe(model)) as (_, about):
                    pass
                self._about = about
                self._ids = TokenIds(cache_folder.token_path(self.path), identity=about["id"])
            self.check_model(model)
        self.level()
        if self.capacity is not None:
            return
        if tokens is None or tokens.device.type != "cpu":
            self._ids.forget()
        else:
            self._ids.write(self.get_seq_length(), tokens)

    def check_model(self, model: nn.Module) -> None:
        """Raises ValueError if a model with other weights wrote the files; `model` is the model without its head."""
        compared = weakref.ref(model), cache_folder.writes(model)
        if self._about is None or self._checked == compared:
            return
        about = {**self._about, **cache_folder.describe(model)}
        if self._about != about:
            raise ValueError(
                f"{self.path} was written by a model with other weights, slopes or layers ({self._about['layers']} layers, "
                f"fingerprint {self._about['fingerprint'][:12]}) than this one ({about['layers']}, {about['fingerprint'][:12]}); "
                "pass the model that wrote it, or read the text into a new cache"
            )
        self._checked = compared

    def tokens(self) -> Tensor | None:
        """The ids of the cached tokens, [B, S] int64; None if they are unknown, also after keys or values were changed."""
        length = self.get_seq_length()
        changed = sum(layer.store.notice_changes() or layer.moved for layer in self.layers) > 0
        if self.capacity is not None or length == 0 or changed:
            return None
        return self._ids.read(self.layers[0].store.groups[0].tensors[0].shape[0], int(length))

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """(keys, values, None) of each layer, as for a `DynamicCache`."""
        for layer in self.layers:
            yield layer.keys, layer.values, None

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """The number of tokens in a layer; None = in all layers, which differ after a forward pass was interrupted.

        With a capacity it is a 0-d tensor, after the first pass.
        """
        if layer_idx is not None:
            return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0
        model = None if self._model is None else self._model()
        if model is not None and len(self.layers) < model.config.num_hidden_layers:  # type: ignore[operator, union-attr]
            return 0
        lengths = self._lengths()
        return self.layers[0].get_seq_length() if lengths is None else min(lengths, key=int, default=0)

    def _lengths(self) -> list[Any] | None:
        """The tokens in each layer; None if a device would have to be read."""
        lengths: list[Any] = [layer.get_seq_length() for layer in self.layers]
        unread = any(isinstance(length, Tensor) and not may_read(length) for length in lengths)
        return None if unread else lengths

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.capacity is not None:
            return self.capacity, 0  # also before the first pass, which creates the layers
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1 if self.capacity is None else self.capacity

    def level(self) -> None:
        """Removes the tokens that only some layers hold, after a forward pass was interrupted.

        On a device, lengths of a cache with a capacity are not read.

        Raises:
            ValueError: some layers have forgotten too much to return.
        """
        lengths, least = self._lengths() or [], self.get_seq_length()
        longer = [layer.store for layer, length in zip(self.layers, lengths, strict=False) if length > least]
        if any(any(store.forgotten) for store in longer):
            raise ValueError(
                f"the layers of this cache hold {sorted(set(map(int, lengths)))} tokens, because a forward pass was interrupted, "
                "and have forgotten some; pass the text again with a new ALiBiCache(forget=True)"
            )
        for store in longer:
            store.crop(int(least))

    @property
    def kept(self) -> list[tuple[int, ...]]:
        """Tokens that each key head of each layer holds."""
        return [layer.store.kept for layer in self.layers]

    @property
    def forgotten(self) -> list[tuple[int, ...]]:
        """Tokens that each key head of each layer has dropped."""
        return [layer.store.forgotten for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Memory of the cached tensors, including spare capacity; of a cache in files, the bytes stored there."""
        return sum(layer.store.nbytes for layer in self.layers)

    def __repr__(self) -> str:
        place = "in memory" if self.path is None else f"in {self.path}"
        held = f"capacity={self.capacity}" if self.capacity is not None else f"{self.get_seq_length()} tokens"
        forgot = f", which keep {self.kept}" if self.forget else ""
        return f"ALiBiCache({held}, {len(self.layers)} layers{forgot}, {self.nbytes} bytes {place})"

    def __getstate__(self) -> dict[str, object]:
        stores = [layer.store for layer in self.layers]
        if self.capacity is None and not self.forget:
            return {"format": FORMAT, "stores": stores}
        choices = {name: vars(self)[name] for name in ("capacity", "forget", "tolerance")}
        padding = [layer.padding for layer in self.layers]
        return {"format": FORMAT_OF_CHOICES, "stores": stores, "choices": choices, "padding": padding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_format("ALiBiCache", state, reads=(FORMAT, FORMAT_OF_CHOICES))
        ALiBiCache.__init__(self, **state.get("choices", {}))
        self.layers = [CacheLayer(store, forgets=self.forget) for store in state["stores"]]
        for layer, padding in zip(self.layers, state.get("padding", ()), strict=False):
            layer.padding = padding

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by layers of transformers: appends keys and values; returns all keys and values of the layer.

        Raises:
            ValueError: the first pass of a model without `patch` was interrupted, and this layer has not seen its tokens; or the
                cache is in files or forgets, which needs our layers.
        """
        layer = self._layer(layer_idx)
        if layer_idx == 0:
            self.level()
        pair = layer.update(key_states, value_states)
        if self.capacity is None and len(self.layers[0].store) not in (0, len(layer.store)):
            raise ValueError(
                f"layer 0 of this cache holds {len(self.layers[0].store)} tokens and layer {layer_idx} holds {len(layer.store)}, "
                "because an earlier pass was interrupted; call reset() and pass the text again"
            )
        return pair

    def append(
        self,
        layer: nn.Module,
        key: Tensor,
        value: Tensor,
        log_fgate: Tensor | None = None,
        *,
        query: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> list[Kept]:
        """Called by patched and our own layers: as `KVCache.append`.

        Args:
            layer: the attention layer, with its `layer_idx`; one with forget gates makes the store that forgets.
            query: [B, H, T, D], for a cache that forgets.
            seen: [B, S] bool over the cached tokens and the new ones, for a cache that forgets; None = all are visible.
        """
        held = self._layer(cast("int", layer.layer_idx))
        if not torch.compiler.is_compiling():
            held.own(layer)
        bounded: dict[str, Any] = {}
        if self.forget:
            if query is None or log_fgate is None:
                raise ValueError(FOR_GATES)
            if torch.compiler.is_compiling():
                raise ValueError("ALiBiCache(forget=True) does not compile; use ALiBiCache()")
            if held.store.retention is None:
                held._store = layer.reach_cache(query.dtype, self.tolerance)  # type: ignore[operator]
            log_fgate = cut_after_padding(held, log_fgate, seen)
            settings: Any = layer.alibi_settings
            bounded = {"query": query, "slopes": torch.tensor(settings.slopes), "scale": settings.scale}
        held.lazy_initialization(key, value)
        return held.store.append(key, value, log_fgate, **bounded)

    def appendable(self, owners: Sequence[nn.Module | None]) -> list[Growing] | None:
        """The storages of all layers if `Growing.extend` may append to them for these attention layers; else None."""
        if not self.layers or len(self.layers) != len(owners) or self.capacity is not None or self.forget:
            return None
        pairs = list(zip(self.layers, owners, strict=True))
        if self.path is not None:  # `begin` has compared the model
            for layer, owner in pairs:
                layer.owner = weakref.ref(owner) if layer.owner is None and owner is not None else layer.owner
        if any(layer.owner is None or layer.owner() is not owner for layer, owner in pairs):
            return None
        storages = [group for layer in self.layers for group in layer.store.groups]
        plain = all(len(group.tensors) == 2 and group.start == 0 and group.length for group in storages)
        equal = len(storages) == len(pairs) and len({group.length for group in storages}) == 1
        return storages if plain and equal else None

    def _layer(self, layer_idx: int) -> CacheLayer:
        while len(self.layers) <= layer_idx:
            if self.path is None:
                store = KVCache(capacity=self.capacity)
            elif self._about is None:
                raise ValueError(NEEDS_PATCH)
            else:
                store = cache_folder.open_layer(self.path, self._about, len(self.layers), "r+")
            self.layers.append(CacheLayer(store, forgets=self.forget))
        return self.layers[layer_idx]
