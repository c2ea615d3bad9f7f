"""The models of appendix A.3 (Toronto BookCorpus): another domain, the same slopes.

paper: the WikiText-103 model with the adaptive embedding and softmax replaced by one tied matrix of 29,000 byte pairs.
The corpus is not distributed any more: pass the books as files (--text). small, medium: as for WikiText-103, with half as many
byte pairs, as the vocabulary is the smaller one in the paper too; --text gives it books.
"""

import dataclasses

from alibi_attn.lab.config import DataConfig, Method, RunConfig, Scale
from alibi_attn.recipes.paper import wikitext

TRAINED = (512, 1024, 3072)


def training(method: Method, paper_length: int, scale: Scale, *, staged: bool = False) -> RunConfig:
    """The model of a method, trained at a length of the paper; `staged`: short examples first."""
    run = wikitext.training(method, paper_length, scale, staged=staged)
    vocabulary = {"smoke": 256, "small": 1024, "medium": 1024, "paper": 29_000}[scale]
    model = dataclasses.replace(run.model, vocab_size=vocabulary, cutoffs=())
    return dataclasses.replace(run, model=model, data=_DATA[scale])


_DATA: dict[Scale, DataConfig] = {
    "smoke": DataConfig(test_share=0.05, valid_share=0.1),  # not WikiText's split: another corpus in name and in tokens
    "small": DataConfig(tokenizer="bpe:1024", test_share=0.05),
    "medium": DataConfig(tokenizer="bpe:1024", test_share=0.05),
    "paper": DataConfig(corpus="hub:bookcorpus/bookcorpus", tokenizer="bpe:29000", test_share=0.05),
}
