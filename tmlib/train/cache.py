"""JAX's persistent compilation cache, for the duration of a run."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

__all__ = ['compilation_cache']


@contextlib.contextmanager
def compilation_cache(folder: str) -> Iterator[None]:
  """Keeps every compiled program in `folder`; '' leaves JAX's setting alone.

  Args:
    folder: made if absent. A second process with the same programs, devices
      and JAX reads them from there.

  Yields:
    Nothing.
  """
  if not folder:
    yield
    return
  wanted = {
    'jax_compilation_cache_dir': folder,
    # By default JAX keeps only what took a second to compile.
    'jax_persistent_cache_min_compile_time_secs': 0.0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }
  before = {name: jax.config.values[name] for name in wanted}
  _set(wanted)
  try:
    yield
  finally:
    _set(before)


def _set(values) -> None:
  for name, value in values.items():
    jax.config.update(name, value)
  # JAX looks at the folder once per process, unless told to look again.
  jax_cache.reset_cache()
