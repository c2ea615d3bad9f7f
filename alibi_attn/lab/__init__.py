"""The lab: train short, test long (Press et al. 2022). Read `config.py` first; `docs/lab.md` says how it works."""
