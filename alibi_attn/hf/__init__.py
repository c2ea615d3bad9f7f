"""ALiBi models of `transformers` (BLOOM, MPT, Falcon with alibi=True) on our attention, and checkpoints to and fro.

Read `patching.py` first, then one family: `bloom.py`, `mpt.py`, `falcon.py`. `docs/hf.md` shows how it is used.
"""

from alibi_attn.hf.patching import Patch, patch

__all__ = ["Patch", "patch"]
