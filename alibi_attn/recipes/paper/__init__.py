"""The paper's eleven figures and fifteen tables (Press et al. 2022, arXiv:2108.12409v2), each as a recipe and its answer.

`cells.py` says what an item is made of; `wikitext.py`, `books.py`, `web.py` and `speed.py` have the trainings that items
share; `items.py` lists the items; `answers.py` turns records into a figure's series or a table's rows; `run_items.py` does
what is missing and records the answers. How to read ours against theirs: docs/paper.md.
"""
