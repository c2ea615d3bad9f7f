"""The paper's eleven figures and fifteen tables (Press et al. 2022, arXiv:2108.12409v2), each with a recipe and an answer.

`cells.py` defines an item; `studies.py` has the trainings that items share, at the sizes in `studies.toml`; `items.py` lists the
items; `answers.py` turns records into the series of a figure or the rows of a table; `run_items.py` runs what is missing and
records the answers. docs/paper.md compares our numbers with the published ones.
"""
