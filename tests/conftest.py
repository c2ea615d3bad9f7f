"""Settings for every test: the same examples each time, no wall-clock deadline on a busy machine, and quick compiling in XLA.

Compiling is most of what tests of JAX do: with level 1 its conformance tests take 1.4 times as long, and with the usual one the
examples of docs/jax.md 1.3 times.
"""

import os

from hypothesis import settings

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

settings.register_profile("alibi-attn", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("alibi-attn")
