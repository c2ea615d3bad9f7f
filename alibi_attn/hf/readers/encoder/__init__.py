"""Encoders with ALiBi: the post-norm BERT with a gated feed-forward of Jina v2, Jina v2 code, MosaicBERT and DNABERT-2.

One implementation; the families differ in fields of `encoder_config.py`. Read `layers.py` (the formulas), then
`models.py`; `packing.py` explains why padding costs nothing. The families' weight names are in
`families/`, reading and writing in `checkpoint.py`.
"""
