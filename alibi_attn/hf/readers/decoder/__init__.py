"""`ALiBiForCausalLM`: one decoder for ALiBi checkpoints whose original code no longer runs on transformers.

`decoder_config.py` lists the options, `model.py` computes, `rounding.py` reproduces the originals' rounding,
and `loading.py` loads. The families' weight names are in `families/`.
"""
