"""`ALiBiForCausalLM`: one decoder for the ALiBi checkpoints whose own code transformers no longer runs.

`config.py` says what may differ between them, `model.py` computes, `rounding.py` rounds as the originals did, and `loading.py`
reads: one file for each family of checkpoints has its names, `baichuan.py`, `cerebras.py`, `foundry.py`, `refact.py`.
"""
