"""The laboratory of alibi-attn: train short, test long; benchmarks, recipes of the paper's figures, reports from records.

`lab/` trains and evaluates, `recipes/` are experiments, `measure/` benchmarks, `report/` draws records (`records.py`), and
`cli/` is the command `alibi`. It uses the library through its public names and `alibi_attn.inspect`.
"""
