"""Two devices on the CPU, so that sharding is tested; set before JAX starts any."""

import jax

jax.config.update("jax_num_cpu_devices", 2)
