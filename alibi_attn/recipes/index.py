"""Which recipe answers what: by its own name, and by the figure or table of the paper that it regenerates."""

from alibi_attn.lab.config import Recipe
from alibi_attn.recipes import quick

RECIPES: dict[str, Recipe] = {
    "quick": quick.RECIPE,
}
