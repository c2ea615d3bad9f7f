"""CPU without a compiler: torch's fused attention on the certified bands. Read `backend.py`, `pieces.py`, `masks.py`."""
