"""Which recipe answers what: by its own name, and by the figure or table of the paper that it regenerates.

`ITEMS` has the answers to figures and tables beside their recipes; "paper" is all of them.
"""

from alibi_attn.lab.config import Recipe
from alibi_attn.recipes import curriculum, methods, quick, recall, referee, streams
from alibi_attn.recipes.paper.items import ITEMS, PAPER

RECIPES: dict[str, Recipe] = {
    "quick": quick.RECIPE,
    "methods": methods.RECIPE,
    "curriculum": curriculum.RECIPE,
    "recall": recall.RECIPE,
    "referee": referee.RECIPE,
    "streams": streams.RECIPE,
    "paper": PAPER,
    **{name: item.recipe for name, item in ITEMS.items()},
}

__all__ = ["ITEMS", "RECIPES"]
