"""Models of `transformers` with random weights: those that `patch` supports, and a BERT, with learned positions and no bias."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5EncoderModel

from alibi_lab.measure.peers.dense_encoder import Sizes


def decoder(family: str, sizes: Sizes, longest: int = 512) -> Any:
    """A model of the family with random weights (seed 0), ready for inference on up to `longest` tokens."""
    torch.manual_seed(0)
    named = sizes.of_transformers
    plain: Any = dict.fromkeys(("multi_query", "parallel_attn", "new_decoder_architecture"), False)
    made: dict[str, Callable[[], PreTrainedModel]] = {
        "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**named)),
        "mpt": lambda: transformers.MptForCausalLM(transformers.MptConfig(**named, max_seq_len=longest)),
        "falcon": lambda: transformers.FalconForCausalLM(
            transformers.FalconConfig(**named, **plain, alibi=True, bias=True)
        ),
        "t5": lambda: T5EncoderModel(T5Config(**named, d_kv=sizes.width // sizes.heads, d_ff=sizes.inner)),
    }
    return made[family]().requires_grad_(False).train(False)


def plain_bert(sizes: Sizes, longest: int) -> nn.Module:
    """A BERT of these sizes, without a gate in the feed-forward part."""
    options = {"attn_implementation": "sdpa", "initializer_range": sizes.initializer_range}
    config = BertConfig(**(sizes.of_transformers | options), max_position_embeddings=longest)
    return BertModel(config, add_pooling_layer=False).train(False)
