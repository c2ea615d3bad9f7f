"""`ALiBiForCausalLM`: one decoder for the ALiBi checkpoints whose own code transformers no longer runs.

`config.py` lists the choices, `model.py` computes, `rounding.py` rounds as the originals do, and `loading.py` loads.
The families' weight names are in `families/`.
"""
