"""The decoder: x ← x + attention(norm(x)), x ← x + feed-forward(norm(x)), a norm, a head. B, T, S, H, K, D as in
`attention/call/spec.py`; E the width, V the vocabulary.

State dict: embed_tokens.weight [V, E]; in each layers.N: attention_norm, attention.qkv_proj [(H + 2K)·D, E] (q, then k, then v),
attention.q_norm and attention.k_norm (if qk_norm or head_norm_eps), attention.forget_proj [H, E] (if forget_gate),
attention.key_shift.proj and attention.value_shift.proj [K, E] (if shifted), attention.output_norm (if output_norm),
attention.gate_proj [E, E] (if output_gate), attention.out_proj, ffn_norm, ffn.gate_proj (if gated), ffn.up_proj,
ffn.down_proj; norm; lm_head.weight [V, E]. Read next: `layers.py`, `loading.py`.
"""

import os
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from alibi_attn.hf.attention import cached_pass, heads, masks, packed_rows
from alibi_attn.hf.attention.patched_attention import Numerics
from alibi_attn.hf.caches.cache import ALiBiCache
from alibi_attn.hf.readers import checkpoint_files
from alibi_attn.hf.readers.decoder import loading
from alibi_attn.hf.readers.decoder.layers import NEEDS_LENGTH, Block, linear_class, norm
from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.inputs import checked_input
from alibi_attn.nn.allocator import memory_of_layers
from alibi_attn.nn.linear.fastest import linear, mapped

ROWS = 8192  # rows of a head that are normalized at once


class ALiBiForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A language model with ALiBi for the checkpoints of Baichuan-13B, Baichuan2-13B, BTLM-3B-8K, Jais, Refact-1.6B, Replit, MPT
    (including grouped heads and `qk_ln`), the Forgetting Transformer (FoX) and Step-1, without remote code.

    It computes exact attention in linear memory with `alibi_attention`, and supports left or right padding, holes in the mask,
    every mode of `generate` (with an `ALiBiCache` by default), chunked prefill, gradients, activation checkpointing and
    `torch.compile`. Distances are those of the indices in the padded row, as in all originals. Logits at padding are meaningless.

    >>> from alibi_attn.hf import ALiBiCausalLMConfig, ALiBiForCausalLM
    >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=50)
    >>> model = ALiBiForCausalLM(ALiBiCausalLMConfig(**sizes)).eval()
    >>> model.generate(torch.ones(1, 9, dtype=torch.int64), max_new_tokens=3, pad_token_id=0).shape
    torch.Size([1, 12])

    Sources: `docs/decoders.md`; Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """

    config_class = ALiBiCausalLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers' own name and type)
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True
    create_masks_for_generate = staticmethod(masks.padded)

    def __init__(self, config: ALiBiCausalLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = norm(config, config.hidden_size)
        self.lm_head = linear_class(config)(config.hidden_size, config.vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        folder_or_id: str | os.PathLike[str],
        *args: Any,
        dtype: torch.dtype | str | None = None,
        numerics: Numerics | None = None,
        backend: str | None = None,
        normalized_head: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """The model in a folder or a repository of the hub: one of the families, or a folder written by `save_pretrained`.

        The family is recognized by the names of the weights, and its config must agree with all of them. Weights keep the dtype
        in which they were saved, and are not copied if their layout is ours.

        Args:
            dtype: of the weights; None or "auto" for the file's dtype.
            numerics, backend: see `alibi_attn.hf.patch`; None for the config's values, by default "exact" and "auto".
            normalized_head: whether to normalize the rows of the head, as in Baichuan2. Only for a Baichuan whose vocabulary has
                neither 64,000 tokens (Baichuan) nor 125,696 (Baichuan2).
            kwargs: revision, cache_dir, token and local_files_only, for the hub; for a folder written by `save_pretrained`, all
                of transformers' arguments.

        Raises:
            OSError: the folder or repository does not exist.
            ValueError: an unknown family, damaged files, or weights that are missing, unexpected or of the wrong size; the
                message names them.
        """
        chosen = {"numerics": numerics, "backend": backend}
        hub = {name: kwargs[name] for name in checkpoint_files.HUB if name in kwargs}
        folder = checkpoint_files.resolve(folder_or_id, **hub)
        about = checkpoint_files.read_config(folder)
        if about.get("model_type") == ALiBiCausalLMConfig.model_type:
            if normalized_head is not None:
                raise ValueError(
                    f"normalized_head is only for Baichuan's own checkpoints but {folder} was written by save_pretrained; omit it"
                )
            kwargs |= {"dtype": "auto" if dtype is None else dtype}
            return cast("Self", loading.load_saved(super().from_pretrained, folder, *args, chosen=chosen, **kwargs))
        if args or (more := kwargs.keys() - {*checkpoint_files.HUB, *checkpoint_files.IGNORED}):
            raise TypeError(
                f"from_pretrained accepts {', '.join(sorted(more)) if not args else 'more positional arguments'} only for "
                "folders written by save_pretrained of this class; load, then use .to(...), or change the config and save"
            )
        config, state = loading.read(folder, about, normalized_head=normalized_head)
        loading.choose(config, chosen)
        with torch.device("meta"):
            model = cls(config)
        loading.fill(model, state, None if dtype == "auto" else dtype)
        loading.take_generation_config(model, folder)
        return model.eval()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        segment_ids: Tensor | None = None,
        prefix_len: Tensor | None = None,
        positions: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V], and the loss if labels are passed.

        Args:
            input_ids: [B, T]; or inputs_embeds [B, T, E], which are scaled like embeddings.
            attention_mask: [B, S] over the cached tokens and the new ones, 1 = visible; None for all.
            position_ids: [B, T]: only distances matter, but positions that restart begin another text in the same row.
            past_key_values: any cache of transformers; with None and use_cache, a new `ALiBiCache`.
            use_cache: None for the config's value, and False in training.
            labels: [B, T], shifted inside; −100 is ignored.
            segment_ids: [B, S] integers, over the cached tokens and the new ones: equal numbers are one text, and no token
                attends to another text. `cu_seq_lens_q` and `seq_idx` of DataCollatorWithFlattening do the same. Set the label of
                each text's first token to −100.
            prefix_len, positions: [B] integers, and [B, S] fp32 or fp64 like segment_ids; as for `alibi_attention`. The first
                call with a cache must hold the whole prefix.
            logits_to_keep: as in transformers: the number of last positions to compute logits for (0 for all), or which ones.

        Raises:
            ValueError: `output_attentions`, an empty input, a mask of the wrong shape, an argument without effect, or a static
                cache or several texts per row if slopes depend on the length.
        """
        own = {
            "segment_ids": segment_ids,
            "position_ids": position_ids,
            "prefix_len": prefix_len,
            "positions": positions,
        }
        packing = packed_rows.split({**kwargs, **own}, known=(), where="ALiBiForCausalLM")
        config = cast("ALiBiCausalLMConfig", self.config)
        if config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions requests the T×S weights, which this model never builds; alibi_attn.hf.record_attention("
                "model, rows=[...]) records those of a few queries"
            )
        given = checked_input(input_ids, inputs_embeds, width=config.hidden_size)
        x = self.embed_tokens(given) if inputs_embeds is None else given
        asked = use_cache
        use_cache = config.use_cache and not self.training if use_cache is None else use_cache
        if past_key_values is None and use_cache:
            past_key_values = ALiBiCache()
        if config.needs_length and past_key_values is not None and past_key_values.is_compileable:
            raise ValueError(NEEDS_LENGTH)
        keep = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with cached_pass.whole(self, past_key_values, use_cache=asked, new=x.shape[1]), memory_of_layers(x):
            if isinstance(past_key_values, ALiBiCache):
                past_key_values.begin(self, input_ids)
            mask = masks.of_layers(masks.INDEXED, config, x, attention_mask, past_key_values, packing)
            if config.scales_with_length and masks.keys_of(mask).segments is not None:
                raise ValueError(
                    "alibi_scaling with train_seq_len depends on the length of the text; pass one text per row"
                )
            x = self.embedding_dropout(self._times(x, config.embedding_scale))
            states = [x]
            for layer in self.layers:
                x = layer(x, mask, past_key_values=past_key_values)
                states = [*states, x] if keep else [x]
        x = states[-1] = self.norm(x)
        logits = self._logits(_kept(x, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(states) if keep else None,
        )

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.lm_head.weight
        if not self.config.normalized_head:
            return self._times(mapped(self.lm_head, x), self.config.logit_scale)
        if self.config.rounds:
            return self._times(nn.functional.linear(x, nn.functional.normalize(weight)), self.config.logit_scale)
        wide = torch.promote_types(weight.dtype, torch.float32)
        lengths = [torch.linalg.vector_norm(rows, dim=1, dtype=wide) for rows in weight.split(ROWS)]
        factors = self.config.logit_scale / torch.cat(lengths).clamp(min=1e-12)
        return (linear(x, weight) * factors).to(x.dtype)

    def _times(self, x: Tensor, factor: float) -> Tensor:
        """x·factor; with numerics="checkpoint" the factor is rounded first, as in the originals."""
        if factor == 1.0:
            return x
        if self.config.rounds:
            return x * torch.tensor(factor, dtype=x.dtype, device=x.device)
        return x * factor

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`; a given `ALiBiCache` that holds another text raises a ValueError."""
        heads.check_cache(*args, **kwargs)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces transformers' method, so that `generate` uses an `ALiBiCache` by default."""
        wants = generation_config.use_cache is not False and generation_config.cache_implementation is None
        if model_kwargs.get("past_key_values") is None and wants and not generation_config.is_assistant:
            model_kwargs["past_key_values"] = ALiBiCache()
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]


def _kept(x: Tensor, positions: int | Tensor) -> Tensor:
    """The last `positions` of x [B, T, E] (0 = all), or those at these indices [N] or [B, N], or where a mask [B, T] is true."""
    if isinstance(positions, int):
        return x[:, slice(-positions, None)]
    if positions.dim() == 2:
        return x[positions] if positions.dtype == torch.bool else x.take_along_dim(positions[..., None], dim=1)
    return x[:, positions]


AutoConfig.register(ALiBiCausalLMConfig.model_type, ALiBiCausalLMConfig)
AutoModel.register(ALiBiCausalLMConfig, ALiBiForCausalLM)  # there is no class without the head
AutoModelForCausalLM.register(ALiBiCausalLMConfig, ALiBiForCausalLM)
