"""One compilation cache for all tests of the loop and their processes."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from tmlib.train.cache import compilation_cache


@pytest.fixture(scope='session', autouse=True)
def _cache(tmp_path_factory):
  folder = str(tmp_path_factory.mktemp('compiled'))
  with compilation_cache(folder), pytest.MonkeyPatch.context() as patch:
    patch.setenv('JAX_COMPILATION_CACHE_DIR', folder)
    patch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    patch.setenv('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
    yield


@pytest.fixture(autouse=True)
def _no_cache_for_slices(request):
  """What is compiled for devices that are not there cannot be read back."""
  if request.node.get_closest_marker('aot') is None:
    yield
    return
  jax.config.update('jax_enable_compilation_cache', False)
  jax_cache.reset_cache()
  yield
  jax.config.update('jax_enable_compilation_cache', True)
  jax_cache.reset_cache()
