"""`to_alibi`: replaces the position embeddings of a GPT-2, BERT or RoBERTa with ALiBi.

A GPT-2 becomes an `ALiBiForCausalLM`: a pre-norm decoder with LayerNorms, biases and no gates. A BERT or RoBERTa
becomes an `ALiBiBertModel` (or a class with a head) whose feed-forward is not gated. All weights stay except the table
of positions. The new model must be trained before its outputs mean anything: `docs/hf.md`, *Fine-tune to long*.
Source: Press et al. 2022, sec. 3 (arXiv:2108.12409); the idea of converting a pretrained model: MosaicML's Composer.
"""

import copy
import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2LMHeadModel,
    PreTrainedModel,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)

from alibi_attn.hf.patching import unsupported
from alibi_attn.hf.readers import checkpoint
from alibi_attn.hf.readers.decoder.model import ALiBiForCausalLM
from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.encoder.heads import ALiBiBertForMaskedLM, ALiBiBertForSequenceClassification
from alibi_attn.hf.readers.encoder.models import ALiBiBertModel
from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig
from alibi_attn.hf.readers.families import bert_config, cerebras, jina, mosaic
from alibi_attn.hf.readers.families.family import Checkpoint, Options, Source

POSITIONS = ("transformer.wpe.", "embeddings.position_embeddings.")


def to_alibi(model: PreTrainedModel) -> ALiBiForCausalLM | ALiBiBertModel:
    """A new model with the weights of `model`, without its position embeddings and with ALiBi's published slopes.

    `model` is not changed, and shares no memory with the new model, which has the same dtype, device and training mode.
    `save_pretrained` writes a folder for `from_pretrained` of the new class and, after `import alibi_attn.hf`, for AutoModel.

    Args:
        model: a `GPT2LMHeadModel` (becomes an `ALiBiForCausalLM`), or a `BertModel`, `BertForMaskedLM`,
            `BertForSequenceClassification` or the same of RoBERTa (become an `ALiBiBertModel` or a class with that head). In
            training, the classifier of a RoBERTa loses the dropout before its first layer.

    Raises:
        TypeError: another class; the message has the reason.
        ValueError: cross-attention, a decoder, weights that the class does not have (adapters, quantized layers), or weights on
            several devices or none.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50, n_positions=16))
    >>> to_alibi(model)(torch.ones(1, 100, dtype=torch.long)).logits.shape
    torch.Size([1, 100, 50])
    """
    _check(model)
    state, result = _state(model), _RESULTS[type(model)]
    is_decoder = result is ALiBiForCausalLM
    family = _GPT2 if is_decoder else _BERT
    with torch.device("meta"):
        new = result(_decoder_config(model) if is_decoder else _encoder_config(model))
    stored = Checkpoint(Path(type(model).__name__), Options({}, ""), state, family, family.parts(()))
    new.load_state_dict(checkpoint.converted(new, stored, copies=True), assign=True)
    new.tie_weights()
    if new.can_generate():
        new.generation_config = copy.deepcopy(model.generation_config)
    return new.train(model.training)


def _check(model: PreTrainedModel) -> None:
    """Raises TypeError or ValueError unless the model can be converted."""
    if type(model) not in _RESULTS:
        reason = unsupported.needs_none(model) or unsupported.why_not(model)
        known = ", ".join(kind.__name__ for kind in _RESULTS)
        raise TypeError(
            f"to_alibi got a {type(model).__name__}; " + (reason or f"load the checkpoint as one of {known}")
        )
    if reason := unsupported.why_not(model):
        raise ValueError(reason)
    for name in ("is_decoder", "add_cross_attention"):
        if getattr(model.config, name, False):
            raise ValueError(
                f"the config has {name}=True, but only plain decoders (GPT-2) and encoders can be converted"
            )


def _state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by the names of BERT or GPT-2, without the position embeddings."""
    state = model.state_dict()
    with torch.device("meta"):
        expected = type(model)(model.config).state_dict()
    shapes, wanted = ({name: x.shape for name, x in tensors.items()} for tensors in (state, expected))
    different = {name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name)}
    if different:
        raise ValueError(
            f"this {type(model).__name__} has other weights than its class and config: {checkpoint.listed(different, 3)}; merge "
            "adapters, load it without quantization, and resize embeddings only with resize_token_embeddings"
        )
    devices = {str(x.device) for x in state.values()}
    if len(devices) > 1 or devices == {"meta"}:
        raise ValueError(
            f"the weights are on {' and '.join(sorted(devices))} but must be on one device; load the model without device_map"
        )
    renamed = {_renamed(name): x for name, x in state.items()}
    return {name: x for name, x in renamed.items() if not name.startswith(POSITIONS) and name not in _BIASES}


def _renamed(name: str) -> str:
    return next((ours + name.removeprefix(old) for old, ours in _RENAMES.items() if name.startswith(old)), name)


def _decoder_config(model: PreTrainedModel) -> ALiBiCausalLMConfig:
    config = model.config
    return ALiBiCausalLMConfig(
        **cerebras.gpt2_fields(Options(config.to_dict(), type(model).__name__)),
        initializer_range=config.initializer_range,
        use_cache=config.use_cache,
        attention_scale=None if config.scale_attn_weights else 1.0,
        source="GPT-2",
        tie_word_embeddings=_is_tied(model),
    )


def _encoder_config(model: PreTrainedModel) -> ALiBiBertConfig:
    config = model.config
    is_roberta = config.model_type == "roberta"
    fields = {name: getattr(config, name) for name in (*bert_config.FIELDS, "id2label", "label2id")}
    fields |= {"gated": False, "gate_act": config.hidden_act, "tie_word_embeddings": _is_tied(model)}
    fields["pooler"] = any(name.endswith("pooler.dense.weight") for name in model.state_dict())
    if is_roberta:
        fields["hidden_act"] = "gelu"  # of the head, which RoBERTa does not configure
        fields["max_position_embeddings"] -= config.pad_token_id + 1  # where its positions start
    return ALiBiBertConfig(**fields)


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the head actually shares the embeddings; for a model without such a head, the setting in its config."""
    head, words = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[no-untyped-call]
    if isinstance(head, nn.Linear) and isinstance(words, nn.Embedding):
        return head.weight is words.weight
    return bool(model.config.tie_word_embeddings)


_BIASES = ("cls.predictions.bias", "lm_head.bias")  # unused copies of the decoders' biases
_GPT2 = dataclasses.replace(cerebras.FAMILY, name="GPT-2", model_types=("gpt2",))
_BERT = dataclasses.replace(
    mosaic.FAMILY,
    name="BERT",
    parts=lambda _: {
        **jina.QKV,
        "mlp.wi": Source(("intermediate.dense",)),
        "mlp.wo": Source(("output.dense",)),
        "mlp.layernorm": Source(("output.LayerNorm",)),
    },
)
# Prefixes of the names of BERT's and RoBERTa's weights -> ours.
_RENAMES = {
    "bert.": "",
    "roberta.": "",
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.decoder.": "cls.predictions.decoder.",
    "classifier.dense.": "pooler.dense.",
    "classifier.out_proj.": "classifier.",
}
_RESULTS: dict[type, type] = {
    GPT2LMHeadModel: ALiBiForCausalLM,
    BertModel: ALiBiBertModel,
    BertForMaskedLM: ALiBiBertForMaskedLM,
    BertForSequenceClassification: ALiBiBertForSequenceClassification,
    RobertaModel: ALiBiBertModel,
    RobertaForMaskedLM: ALiBiBertForMaskedLM,
    RobertaForSequenceClassification: ALiBiBertForSequenceClassification,
}
