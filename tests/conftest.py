"""Four virtual CPU devices, strict rank promotion, no surprises by platform."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
# Tests compile far more than they compute: this halves the suite's time. Set
# XLA_FLAGS to test the code that users run.
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')
# Two test processes may ask the TPU compiler at once.
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

import jax  # noqa: E402

jax.config.update('jax_num_cpu_devices', 4)
jax.config.update('jax_numpy_rank_promotion', 'raise')
