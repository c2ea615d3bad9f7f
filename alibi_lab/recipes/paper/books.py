"""The models of appendix A.3 (Toronto BookCorpus): another domain, the same slopes.

paper: the WikiText-103 model with one tied matrix of 29,000 byte pairs in place of the adaptive embedding and softmax.
The corpus is no longer distributed: pass the books as files (--text). small, medium: as for WikiText-103, with half as many
byte pairs, because the paper's vocabulary is smaller for books too; --text sets the books.
"""

import dataclasses

from alibi_lab.lab.config import DataConfig, Method, RunConfig, Scale
from alibi_lab.recipes.paper import wikitext
from alibi_lab.recipes.scales import with_model

TRAINED = (512, 1024, 3072)


def training(method: Method, paper_length: int, scale: Scale, *, staged: bool = False) -> RunConfig:
    """The run of a method trained at a length of the paper; `staged` trains on short examples first."""
    run = wikitext.training(method, paper_length, scale, staged=staged)
    vocabulary = {"smoke": 256, "small": 1024, "medium": 1024, "paper": 29_000}[scale]
    return dataclasses.replace(with_model(run, vocab_size=vocabulary, cutoffs=()), data=_DATA[scale])


_DATA: dict[Scale, DataConfig] = {
    "smoke": DataConfig(test_share=0.05, valid_share=0.1),  # not WikiText's split, so that its records differ
    "small": DataConfig(tokenizer="bpe:1024", test_share=0.05),
    "medium": DataConfig(tokenizer="bpe:1024", test_share=0.05),
    "paper": DataConfig(corpus="hub:bookcorpus/bookcorpus", tokenizer="bpe:29000", test_share=0.05),
}
