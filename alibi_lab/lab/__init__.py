"""The lab: train short, test long (Press et al. 2022). Read `config.py` first; `docs/lab.md` explains how it works."""
