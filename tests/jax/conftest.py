"""Four CPU devices, to test sharding; configured before JAX initializes its devices."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
