"""What the attention of patched models and of our decoder share: `patched_attention.py`, masks, cached passes."""
