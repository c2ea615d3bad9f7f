"""The 1.3-billion-parameter models of section 4.2 (CC100 + RoBERTa's corpus, 461 GB), trained for one epoch.

Published: 25 layers, width 2048, 16 heads, ffn 8192, 50,000 updates, 128 V100. Derived: 2 million tokens per update, from
461 GB in 50,000 updates. Not published, chosen here: AdamW with a learning rate of 2e-4, and 50,000 byte pairs. The corpus is
not available as one dataset on the hub: OpenWebText, a part of it, replaces it; --text sets another.
small and medium: 16 heads as published, a larger model than in the other studies, half as many tokens, more byte pairs.
"""

from alibi_lab.lab.config import Method, RunConfig, Scale
from alibi_lab.recipes.paper import studies
from alibi_lab.recipes.paper.cells import scaled, tested
from alibi_lab.recipes.scales import changed

TRAINED = (512, 1024, 2048)
# figure 6 ends at 10,000; the lengths in between are our choice
EXTRAPOLATED = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10_000)
# L_valid of the curves of figure 5
FIGURE_5 = {("alibi", 512): 1024, ("sinusoidal", 1024): 1024, ("alibi", 1024): 2048, ("sinusoidal", 2048): 2048}
_RUNS = studies.runs("web")


def training(method: Method, paper_length: int, scale: Scale) -> RunConfig:
    """The run of a method trained at a length of the paper; those of figure 5 are validated during training."""
    run = changed(_RUNS[scale], model={"method": method}, train={"length": scaled(paper_length, scale)})
    if (method, paper_length) in FIGURE_5:
        every, length = max(1, run.train.steps // 20), scaled(FIGURE_5[method, paper_length], scale)
        validation = {"validate_every": every, "validate_length": length, "validate_tokens": run.eval.tokens}
        run = changed(run, train=validation)
    return tested(run, [length for length in TRAINED if length >= paper_length], scale)


def extrapolation_lengths(paper_length: int, scale: Scale) -> tuple[int, ...]:
    """Each L_valid of figure 6 from L on; at smoke scale at most three."""
    lengths = tuple(length for length in EXTRAPOLATED if length >= paper_length)
    return lengths if scale != "smoke" else tuple(length for length in lengths if length in (512, 1024, 2048))
