"""`ALiBiBertModel`: an encoder with ALiBi as a transformers model, without remote code.

Padding costs nothing (`packing.py`), no n×n bias or mask is built, and there is no maximum length. `from_pretrained` reads
folders written by `save_pretrained` and those of the families in `families/`.
Read next: `heads.py`, `docs/encoders.md`.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from alibi_attn.attention.call.transforms import may_read
from alibi_attn.hf.readers import checkpoint, checkpoint_files
from alibi_attn.hf.readers.encoder.layers import ALiBiBertEmbeddings, ALiBiBertEncoder, ALiBiBertPooler
from alibi_attn.hf.readers.encoder.packing import packing
from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig
from alibi_attn.hf.readers.families import DECODER_TYPES, ENCODERS
from alibi_attn.hf.readers.families.bert_config import OVERRIDES, WORDS
from alibi_attn.hf.readers.families.mosaic import OWN
from alibi_attn.hf.readers.inputs import check_kind, checked_input
from alibi_attn.nn.allocator import memory_of_layers
from alibi_attn.nn.linear.quantized import QuantizedLinear


class ALiBiBertPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Loading and saving, shared by the encoder and its heads."""

    config_class = ALiBiBertConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = True
    _input_embed_layer = "word_embeddings"  # of `embeddings`, for transformers
    accepts_loss_kwargs = True  # tells the Trainer to pass num_items_in_batch
    _no_split_modules: ClassVar[list[str]] = [  # type: ignore[misc]
        "ALiBiBertEmbeddings",
        "ALiBiBertLayer",
    ]

    config: ALiBiBertConfig

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        folder_or_id: str | os.PathLike[str] | None,
        *,
        new_head: bool = False,
        dtype: torch.dtype | str | None = None,
        output_loading_info: bool = False,
        **options: Any,
    ) -> Any:
        """A model in evaluation mode, from a folder or the hub; code in it is never run. (model, info) with output_loading_info.

        The family is recognized by the names of the weights: MosaicBERT, DNABERT-2, Jina v2, Jina v2 code, Jina CLIP v1's text
        tower, and folders written by `save_pretrained`. No weight of the encoder may be missing or unexpected. Weights outside
        its prefix, such as "bert.", are a head, which is loaded if this class has it, otherwise logged and ignored.

        Args:
            new_head: initialize weights of the head and pooler that are missing from the checkpoint at random, for training;
                also those of a classifier with another `num_labels`.
            dtype: as in transformers; "auto" is the checkpoint's dtype. The default is the same, except that originals
                saved in float16 (such as Jina's), which is slow on CPUs, are loaded in float32.
            options: revision, cache_dir, token, local_files_only; fields of the config, such as num_labels, dropouts or backend;
                state_dict, to replace the weights of the folder; and all others of `PreTrainedModel.from_pretrained`, such as
                device_map.

        Raises:
            OSError: neither a folder nor a repository of the hub, or missing files.
            ValueError: a damaged file, an unknown kind of checkpoint, or one that does not fit this class; the message names it.
        """
        if folder_or_id is None:
            return super().from_pretrained(None, dtype=dtype, output_loading_info=output_loading_info, **options)
        hub = {name: options.pop(name) for name in checkpoint_files.HUB if name in options}
        folder = checkpoint_files.resolve(folder_or_id, **{name: x for name, x in hub.items() if x is not None})
        for name in checkpoint_files.IGNORED:
            options.pop(name, None)
        loaded: Any = cls.from_folder(folder, new_head=new_head, dtype=dtype, **options)
        model, info = loaded
        model.config.name_or_path = str(folder_or_id)
        return (model, info) if output_loading_info else model

    @classmethod
    def from_folder(
        cls, folder: Path, *, new_head: bool = False, dtype: torch.dtype | str | None = None, **options: Any
    ) -> Any:
        """(model, info): `from_pretrained` for a folder that exists, with its arguments but those for the hub."""
        changes = {name: options.pop(name) for name in (*OVERRIDES, "backend", "config") if name in options}
        about = checkpoint_files.read_config(folder)
        if (kind := about.get("model_type")) in DECODER_TYPES:
            raise ValueError(
                f"{folder} holds a decoder ({kind}), which is not an encoder; compute the perplexity of a text with it: alibi "
                "eval-text, or load it as alibi_attn.hf.ALiBiForCausalLM or with transformers and alibi_attn.hf.patch"
            )
        is_own = kind == ALiBiBertConfig.model_type
        families = [OWN] if is_own else ENCODERS.values()
        given = options.pop("state_dict", None)
        config, state = checkpoint.read(
            folder, about, checkpoint_files.read_state(folder) if given is None else given, families, changes=changes
        )  # only `state` holds the weights that were read, which `converted` frees one by one
        if not is_own:
            config.original_layout = next(name for name, family in ENCODERS.items() if family is state.family)
        if dtype is None and "torch_dtype" not in options and not is_own and state.dtype_of(WORDS) == torch.float16:
            dtype = torch.float32
        with torch.device("meta"):
            empty = cls(cast("ALiBiBertConfig", config))
        weights = checkpoint.converted(empty, state, new_head=new_head, copies=True)
        return super().from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, **options
        )

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, layout: str = "own", **options: Any
    ) -> None:
        """Write a folder for `from_pretrained` (and, after `import alibi_attn.hf`, for AutoModel).

        Args:
            layout: "own" saves like transformers, with its arguments. "original" writes the weight names and config of
                the family from which the model was loaded (`config.original_layout`); a key of `families.ENCODERS`
                those of the named family. `from_pretrained` and the family's own code read such folders. They must be
                new, and are written atomically.

        Raises:
            ValueError: an unknown layout, or one that cannot store this model.
            FileExistsError: the folder exists, with a layout other than "own".
        """
        if any(isinstance(module, QuantizedLinear) for module in self.modules()):
            raise ValueError("a model with int8 linear layers cannot be saved; save the one from which it was made")
        if layout == "own":
            super().save_pretrained(save_directory, *args, **options)
            return
        if args or options:
            raise TypeError(f"layout={layout!r} takes no further arguments but got {[*args, *options]}")
        name, known = self.config.original_layout if layout == "original" else layout, ", ".join(map(repr, ENCODERS))
        if name is None:
            raise ValueError(
                f"layout is 'original' but the model was not read from an original; pass 'own' or one of {known}"
            )
        if name not in ENCODERS:
            raise ValueError(f"layout is {name!r} but must be 'own', 'original' or one of {known}")
        checkpoint.write(self, Path(save_directory), ENCODERS[name])


class ALiBiBertModel(ALiBiBertPreTrainedModel):  # type: ignore[no-untyped-call]
    """The encoder: hidden states of every token, and the pooled first token if the config has a pooler.

    Args:
        config: sizes and family.
        add_pooling_layer: whether to add a pooler; None = as in the config.

    >>> model = ALiBiBertModel(ALiBiBertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50))
    >>> model(torch.ones(2, 9, dtype=torch.long)).last_hidden_state.shape
    torch.Size([2, 9, 32])

    Source: Press et al. 2022 (arXiv:2108.12409); the families' papers in `layers.py`.
    """

    def __init__(self, config: ALiBiBertConfig, *, add_pooling_layer: bool | None = None) -> None:
        super().__init__(config)
        self.embeddings = ALiBiBertEmbeddings(config)
        self.encoder = ALiBiBertEncoder(config)
        has_pooler = config.pooler if add_pooling_layer is None else add_pooling_layer
        self.pooler = ALiBiBertPooler(config) if has_pooler else None
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPooling:
        """Hidden states [B, T, E], 0 at padding; pooler_output [B, E], of each text's first token, or None.

        Args:
            input_ids: [B, T] integers in [0, vocab_size).
            attention_mask: [B, T], 1 = token, 0 = padding, which costs nothing if it is on one side only. A hole (0 between 1s)
                is masked, and its neighbors keep their distance.
            token_type_ids: [B, T] integers in [0, type_vocab_size); None = 0.
            inputs_embeds: [B, T, E], word embeddings instead of input_ids.
            segment_ids: [B, T] integers: equal numbers are one text of the row, and no token attends to another text.
                pooler_output is that of the row's first token.
            positions: [B, T] fp32 or fp64, such as times, which must not decrease along a row, padding included: distances are
                |p_i − p_j| in place of |i − j|. Padding then costs as much as tokens.
            output_hidden_states: also return the embeddings and every layer's output.

        Raises:
            ValueError: wrong shapes, values other than 0 and 1 in the mask, ids outside the vocabulary (checked if values can be
                read without synchronizing), or output_attentions.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError(
                "output_attentions requests the T×T weights, which are never built; alibi_attn.hf.record_attention(model, "
                "rows=[...]) records those of a few queries"
            )
        given = _checked(input_ids, inputs_embeds, token_type_ids, self.config)
        # Dropout computes all scores of a row.
        dropping = self.training and self.config.attention_probs_dropout_prob > 0
        may_pack = positions is None and not (dropping or self.encoder.needs_whole_rows())
        how = packing(attention_mask, *given.shape[:2], may_pack=may_pack, segment_ids=segment_ids)
        how = dataclasses.replace(how, positions=positions)
        types = None if token_type_ids is None else how.pack(token_type_ids)
        words = how.pack(given) if input_ids is None else self.embeddings.word_embeddings(how.pack(given))
        x = self.embeddings(words, types)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [how.unpack(x)] if wanted else []
        with memory_of_layers(x):
            for layer in self.encoder.layer:
                x = layer(x, how)
                if wanted:
                    states.append(how.unpack(x))
        last = states[-1] if wanted else how.unpack(x)
        return BaseModelOutputWithPooling(
            last_hidden_state=last,
            pooler_output=None if self.pooler is None else self.pooler(how.first(last)),
            hidden_states=tuple(states) if wanted else None,
        )


def _checked(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, token_type_ids: Tensor | None, config: ALiBiBertConfig
) -> Tensor:
    """Validates the inputs. Returns input_ids or inputs_embeds, whichever was passed."""
    given = checked_input(input_ids, inputs_embeds, width=config.hidden_size)
    if token_type_ids is not None:
        check_kind("token_type_ids", token_type_ids, is_index=True)
        if token_type_ids.shape != given.shape[:2]:
            raise ValueError(
                f"token_type_ids has shape {list(token_type_ids.shape)} but must be [B, T] = {list(given.shape[:2])}"
            )
    for name, ids, end in (
        ("input_ids", input_ids, config.vocab_size),
        ("token_type_ids", token_type_ids, config.type_vocab_size),
    ):
        if ids is not None and may_read(ids) and not bool(((ids >= 0) & (ids < end)).all()):
            raise ValueError(f"{name} has values from {int(ids.min())} to {int(ids.max())} but must be in [0, {end})")
    return given


# Folders written by save_pretrained load through AutoModel. Originals have model_type "bert", which is taken by BERT.
AutoConfig.register(ALiBiBertConfig.model_type, ALiBiBertConfig)
AutoModel.register(ALiBiBertConfig, ALiBiBertModel)
