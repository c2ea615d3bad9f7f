"""Recipes: one file per question, with its command, cost and expected result; `index.py` lists them."""
