"""The BERT of `transformers` through SDPA: learned positions, no bias."""

from torch import nn
from transformers import BertConfig, BertModel

from alibi_lab.measure.peers.dense_encoder import Sizes


def plain_bert(sizes: Sizes, longest: int) -> nn.Module:
    """A BERT of these sizes, without a gate in the feed-forward part."""
    options = {"attn_implementation": "sdpa", "initializer_range": sizes.initializer_range}
    config = BertConfig(**(sizes.of_transformers | options), max_position_embeddings=longest)
    return BertModel(config, add_pooling_layer=False).train(False)
