"""What is measured for figures 2 and 7 and table 1: each method at each length, a few steps of training and one test.

At 3,072 tokens batches are split in three, as in the paper. The measuring itself is in `measure_speed.py`.
"""

import dataclasses

from alibi_attn.lab.config import EvalConfig, Method, RunConfig, Scale
from alibi_attn.recipes.paper import wikitext

WARM_STEPS = 2  # not counted


def run(method: Method, paper_length: int, scale: Scale) -> RunConfig:
    """What is measured: the WikiText-103 model, about 9,216 tokens a step (small: 2,304; medium: 4,608), a few steps."""
    whole = wikitext.training(method, paper_length, scale)
    accumulate = 3 if paper_length == wikitext.LONGEST else 1
    unit = whole.train.length * accumulate
    batch_tokens = {"smoke": 288, "small": 2304, "medium": 4608, "paper": 9216}[scale] // unit * unit
    steps = {"smoke": WARM_STEPS + 1, "small": WARM_STEPS + 6, "medium": WARM_STEPS + 6, "paper": WARM_STEPS + 20}[
        scale
    ]
    train = dataclasses.replace(
        whole.train,
        steps=steps,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
        warmup_steps=1,
        checkpoint_every=steps,
    )
    length = whole.train.length
    test = EvalConfig(lengths=(length,), stride=length, tokens=2 * batch_tokens, batch_tokens=batch_tokens)
    return dataclasses.replace(whole, train=train, eval=test)
