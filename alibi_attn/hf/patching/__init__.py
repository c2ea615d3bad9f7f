"""Changes models that are loaded: `patching.py` is `patch`, `surgery.py` is `to_alibi`, `reading.py` is `read`."""
