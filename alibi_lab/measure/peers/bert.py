"""The BERT of `transformers` through SDPA: learned positions, no bias."""

from torch import nn
from transformers import BertConfig, BertModel

from alibi_lab.measure.peers.dense_encoder import Sizes


def plain_bert(sizes: Sizes, longest: int) -> nn.Module:
    """A BERT of these sizes, without a gate in the feed-forward part."""
    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        attn_implementation="sdpa",
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner,
        max_position_embeddings=longest,
        initializer_range=sizes.initializer_range,
    )
    return BertModel(config, add_pooling_layer=False).train(False)
