"""Four devices on the CPU, so that sharding is tested, and quick compiling, which is most of what these tests do.

With level 1 the conformance tests take 1.4 times as long. Both are settled before JAX starts its first device.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax

jax.config.update("jax_num_cpu_devices", 4)
