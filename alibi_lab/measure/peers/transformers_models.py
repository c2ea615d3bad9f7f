"""Models of `transformers` with random weights: those that `patch` supports, and a BERT, with learned positions and no bias."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import BertConfig, BertModel, BloomForCausalLM, PreTrainedModel
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5EncoderModel

from alibi_lab.measure.peers.dense_encoder import Sizes


def bloom(width: int, *, layers: int, heads: int, vocabulary: int) -> BloomForCausalLM:
    """A BLOOM with random weights (seed 0), ready for inference."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(hidden_size=width, n_layer=layers, n_head=heads, vocab_size=vocabulary)
    model: BloomForCausalLM = BloomForCausalLM(config).requires_grad_(False).train(False)
    return model


def decoder(family: str, width: int, longest: int, *, layers: int, heads: int, vocabulary: int) -> PreTrainedModel:
    """A model of the family with random weights (seed 0), ready for inference on up to `longest` tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "vocab_size": vocabulary}
    plain: Any = dict.fromkeys(("multi_query", "parallel_attn", "new_decoder_architecture"), False)
    of_t5: Any = {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_layers": layers, "num_heads": heads}
    made: dict[str, Callable[[], PreTrainedModel]] = {
        "bloom": lambda: bloom(width, layers=layers, heads=heads, vocabulary=vocabulary),
        "mpt": lambda: transformers.MptForCausalLM(transformers.MptConfig(**sizes, max_seq_len=longest)),
        "falcon": lambda: transformers.FalconForCausalLM(
            transformers.FalconConfig(**sizes, **plain, alibi=True, bias=True)
        ),
        "t5": lambda: T5EncoderModel(T5Config(vocab_size=vocabulary, **of_t5)),
    }
    return made[family]().requires_grad_(False).train(False)


def plain_bert(sizes: Sizes, longest: int) -> nn.Module:
    """A BERT of these sizes, without a gate in the feed-forward part."""
    options = {"attn_implementation": "sdpa", "initializer_range": sizes.initializer_range}
    config = BertConfig(**(sizes.of_transformers | options), max_position_embeddings=longest)
    return BertModel(config, add_pooling_layer=False).train(False)
