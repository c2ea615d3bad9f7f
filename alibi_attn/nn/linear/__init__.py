"""Linear layers: with the fastest kernel of the processor (`fastest.py`), and in int8 or float8 (`quantized.py`)."""
