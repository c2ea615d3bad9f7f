"""From the arguments of a call to its description, `spec.py`, and its meaning: which keys are visible, with which bias."""
