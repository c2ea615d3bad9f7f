"""Four devices on the CPU, so that sharding is tested; settled before JAX starts its first one."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
