"""Recipes: one file per question, each with its own command, cost and expected result; `index.py` lists them."""
