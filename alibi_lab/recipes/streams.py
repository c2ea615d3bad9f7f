"""Streaming evaluation: pieces, a sliding window, segments with a memory, a window with attention sinks; three position methods.

Papers: Dai et al. 2019 (Transformer-XL, arXiv:1901.02860), sec. 3.1, whose memory is as long as a segment; Xiao et al. 2023
(StreamingLLM, arXiv:2309.17453), sec. 3.2, who keep the first 4 tokens. Both test large models or models built for streaming.
Here any trained model is tested, and each way of reading scores the same tokens (`lab/evaluation/evaluate.py`).
"""

from alibi_lab.lab.config import Method, Recipe, RunConfig, Scale
from alibi_lab.lab.scales import LARGE, MEDIUM, SMALLER, TINY, by_method, changed, trained_at

COMPARED: tuple[Method, ...] = ("sinusoidal", "rotary", "alibi")
_SMALL = changed(SMALLER, model={"num_layers": 4}, train={"steps": 1000, "warmup_steps": 100})
_RUNS: dict[Scale, RunConfig] = {  # memories of L and 4 L tokens, with 0 and 4 sinks
    "smoke": trained_at(TINY, (16, 64), memory=(16,), sinks=(0, 4)),
    "small": trained_at(_SMALL, (64, 128, 256, 512), tokens=8192, memory=(64, 256), sinks=(0, 4)),
    "medium": trained_at(MEDIUM, (128, 256, 512, 1024), tokens=16_384, memory=(128, 512), sinks=(0, 4)),
    "paper": trained_at(LARGE, (512, 1024, 2048), memory=(512, 1024), sinks=(0, 4)),
}


RECIPE = Recipe(
    name="streams",
    question="Does reading in segments with a memory, or in a window with attention sinks, match a sliding window?",
    paper="none: Dai et al. 2019 and Xiao et al. 2023, for the methods of figure 1",
    cost="small: seven minutes of one core, measured; smoke: seconds; medium and paper: not run",
    expected=(
        "with ALiBi, cached segments beat pieces of the same length (3.91 per byte against 4.17 at 64) and come within 1 % of a "
        "sliding window in one pass over the text; rotary and sinusoidal get worse at the distances that a memory adds; a "
        "rolling window is within 1 % of the sliding one with four sinks or none: this small model does not rely on first tokens"
    ),
    runs=lambda scale: by_method(_RUNS[scale], COMPARED),  # the same model, data, order and seed for every method
)
