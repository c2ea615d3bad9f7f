"""Models that `patch` supports, of `transformers` and with random weights: BLOOM, MPT, Falcon-RW and T5's encoder."""

from typing import Any

import torch
import transformers
from transformers import BloomForCausalLM, PreTrainedModel
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5EncoderModel

FAMILIES = ("bloom", "mpt", "falcon", "t5")
HEADS, LAYERS, VOCABULARY = 16, 2, 1000


def bloom(width: int, *, layers: int = LAYERS, heads: int = HEADS, vocabulary: int = VOCABULARY) -> BloomForCausalLM:
    """A BLOOM with random weights (seed 0), ready for inference."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(hidden_size=width, n_layer=layers, n_head=heads, vocab_size=vocabulary)
    model: BloomForCausalLM = BloomForCausalLM(config).requires_grad_(False).train(False)
    return model


def decoder(
    family: str, width: int, longest: int, *, layers: int = LAYERS, heads: int = HEADS, vocabulary: int = VOCABULARY
) -> PreTrainedModel:
    """A model of the family with random weights (seed 0), ready for inference on up to `longest` tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "vocab_size": vocabulary}
    model: PreTrainedModel
    if family == "bloom":
        return bloom(width, layers=layers, heads=heads, vocabulary=vocabulary)
    if family == "mpt":
        model = transformers.MptForCausalLM(transformers.MptConfig(**sizes, max_seq_len=longest))
    elif family == "falcon":
        sizes |= dict.fromkeys(("multi_query", "parallel_attn", "new_decoder_architecture"), False)
        model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=True, bias=True))
    elif family == "t5":
        sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_layers": layers, "num_heads": heads}
        model = T5EncoderModel(T5Config(vocab_size=vocabulary, **sizes))
    else:
        raise ValueError(f"family is {family!r} but must be one of {', '.join(FAMILIES)}")
    return model.requires_grad_(False).train(False)
