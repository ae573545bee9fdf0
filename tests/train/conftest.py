"""One compilation cache for all tests of the loop and their processes."""

import os

import pytest

from tmlib.train.cache import compilation_cache


@pytest.fixture(scope='session', autouse=True)
def _cache(tmp_path_factory):
  folder = str(tmp_path_factory.mktemp('compiled'))
  with compilation_cache(folder), pytest.MonkeyPatch.context() as patch:
    patch.setenv('JAX_COMPILATION_CACHE_DIR', folder)
    patch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    patch.setenv('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
    yield folder
  assert os.environ.get('JAX_COMPILATION_CACHE_DIR') != folder
