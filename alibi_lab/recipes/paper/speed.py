"""The speed runs of figures 2 and 7 and table 1: each method at each length, training steps and one evaluation.

At 3,072 tokens, batches are split in three, as in the paper. `measure_speed.py` does the measuring.
"""

from alibi_lab.lab.config import Method, RunConfig, Scale
from alibi_lab.recipes.paper import wikitext
from alibi_lab.recipes.scales import trained_at

WARM_STEPS = 2  # not timed


def run(method: Method, paper_length: int, scale: Scale) -> RunConfig:
    """20 timed steps of the WikiText-103 model with about 9,216 tokens each (small: 2,304; medium: 4,608)."""
    whole = wikitext.training(method, paper_length, scale)
    accumulate = 3 if paper_length == wikitext.LONGEST else 1
    unit = whole.train.length * accumulate
    batch_tokens = {"smoke": 288, "small": 2304, "medium": 4608, "paper": 9216}[scale] // unit * unit
    steps = WARM_STEPS + (1 if scale == "smoke" else 20)
    length = whole.train.length
    train = {"steps": steps, "accumulate": accumulate, "warmup_steps": 1, "checkpoint_every": steps}
    batch = {"batch_tokens": batch_tokens}
    return trained_at(whole, (length,), train | batch, stride=length, tokens=8 * batch_tokens, **batch)
