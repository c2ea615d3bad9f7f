"""Texts to vectors: `sentence_encoder.py`, `late_chunking.py`, and what `alibi embed` writes."""
