r"""Attention pooling of ragged segments on TPU, GPU and CPU.

Axes: B rows of N instances, S segments per row, D features, A units of a gate.

`implementation`: None is Pallas on TPU and GPU and plain jax.numpy elsewhere,
decided when the program is compiled, and plain jax.numpy wherever Pallas can
not; "pallas" insists on Pallas; "xla" (or "reference") is plain jax.numpy, and
alone has forward mode and derivatives of second order; "interpret" and
"interpret_gpu" run the TPU's and the GPU's body in Pallas' interpreter.

Under a mesh (`jax.set_mesh`) whose axes are of type Auto, rows are divided over
the axis 'data' where it divides them. A row is never divided: a segment lies
whole on one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.common.checks import (
  check_implementation,
  checked_integers,
  known,
)
from kernels_pallas.graph.pooling import reference, vjp
from kernels_pallas.graph.pooling.gate import Gate

__all__ = ['segment_pool']


def _float(name: str, x: Any, shape: tuple[int | None, ...]) -> jax.Array:
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f'{name} has dtype {x.dtype}, expected a float dtype')
  fits = len(shape) == x.ndim and all(
    want in (None, size) for want, size in zip(shape, x.shape, strict=True)
  )
  if not fits:
    want = tuple('any' if size is None else size for size in shape)
    raise ValueError(f'{name} has shape {x.shape}, expected {want}')
  return x


def _gate(gate: Gate, rows: tuple[int, ...]) -> Gate:
  t = _float('scores.tanh', gate.tanh, (*rows, None))
  u = gate.sigmoid
  if u is not None:
    u = _float('scores.sigmoid', u, t.shape)
  return Gate(t, u, _float('scores.weight', gate.weight, t.shape[-1:]))


def _ids(
  segment_ids: Any, mask: Any, shape: tuple[int, ...], num_segments: int
) -> jax.Array:
  """-1 for an instance of no segment."""
  ids = checked_integers('segment_ids', segment_ids, shape)
  if mask is not None:
    mask = jnp.asarray(mask)
    if mask.shape != shape or mask.dtype != bool:
      raise ValueError(
        f'mask has shape {mask.shape} and dtype {mask.dtype}, expected bool '
        f'{shape}, a value per instance'
      )
    ids = jnp.where(mask, ids, -1)
  values = known(ids)
  if values is not None and values.size:
    highest = int(values.max())
    if highest >= num_segments:
      raise ValueError(
        f'segment_ids holds {highest}, but there are num_segments='
        f'{num_segments}; raise it, or mark instances of no segment by -1'
      )
  return jnp.where(ids < num_segments, ids, -1)


def segment_pool(
  values: jax.Array,
  scores: jax.Array | Gate,
  segment_ids: jax.Array,
  num_segments: int,
  *,
  mask: jax.Array | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  r"""z_s = sum_{n in s} a_n h_n with a = softmax of the scores within s.

  In one pass over the instances, which reads each of them once: scores, peaks,
  sums of exponentials and weighted sums together. Sums run in float32 or wider,
  products in the dtype of values, and those of float32 in full precision.
  Differentiable in values and scores (or the arrays of a gate), also through
  lse; the attention weights are exp(scores - lse[segment]). Instances of a
  segment need not lie together, but neighbours are faster to pool.

  Args:
    values: [B, N, D] or [N, D], float, features h of instances. What belongs to
      no segment may hold anything.
    scores: [B, N] or [N], float, attention before the softmax; -inf hides an
      instance, which may then hold anything. Or a `Gate` for
      e_n = sum_a w_a tanh(t_na) sigmoid(u_na), which is then computed in the
      same pass.
    segment_ids: [B, N] or [N], int < num_segments, the segment of each instance
      within its row; -1 for none. Under jit, larger ones are none, too.
    num_segments: S >= 1.
    mask: [B, N] or [N], bool; False is the same as the id -1.
    return_lse: return the logarithm of the sum of exponentials as well.
    implementation: see the module docstring. The Pallas bodies take up to 1024
      features on a GPU; on a TPU 1 MiB in 128 instances with their gates, and
      12 D + 2560 bytes per segment up to 10 MiB in a row.

  Returns:
    pooled: [B, S, D] or [S, D], dtype of values; zeros for an empty segment.
    lse: [B, S] or [S], float32 or wider, if `return_lse`; -inf for an empty
      segment.

  Raises:
    ValueError: on shapes that disagree, segment ids out of range as far as they
      are known, or an unknown implementation.
    TypeError: on a wrong dtype.

  References:
    Ilse, Tomczak, Welling. Attention-based deep multiple instance learning,
    2018.
  """
  values = jnp.asarray(values)
  if values.ndim not in (2, 3):
    raise ValueError(
      f'values has shape {values.shape}, expected [B, N, D] or [N, D]'
    )
  if not isinstance(num_segments, int | np.integer) or num_segments < 1:
    raise ValueError(
      f'num_segments={num_segments!r} must be an integer of at least 1'
    )
  values = _float('values', values, values.shape)
  rows = values.shape[:-1]
  gate = _gate(scores, rows) if isinstance(scores, Gate) else None
  plain = None if isinstance(scores, Gate) else _float('scores', scores, rows)
  num_segments = int(num_segments)
  ids = _ids(segment_ids, mask, rows, num_segments)
  if plain is not None:
    ids = jnp.where(plain == -jnp.inf, -1, ids)
  single = values.ndim == 2
  if single:
    values, ids = values[None], ids[None]
    plain = None if plain is None else plain[None]
    if gate is not None:
      u = None if gate.sigmoid is None else gate.sigmoid[None]
      gate = Gate(gate.tanh[None], u, gate.weight)
  gpu = implementation == 'interpret_gpu'
  if implementation == 'pallas':
    gpu = jax.default_backend() == 'gpu'
  where = 'cuda' if gpu else 'tpu'
  reason = vjp.refusal(values, plain, gate, num_segments, where)
  check_implementation(implementation, reason)
  operands = values, plain, gate, ids
  nothing = not values.size or (gate is not None and not gate.weight.size)
  if implementation in ('xla', 'reference') or nothing:
    pooled, lse = reference.forward(*operands, num_segments)
    pooled = pooled.astype(values.dtype)
  else:
    both: Any = vjp.core(implementation, num_segments, *operands)
    pooled, lse = both
  if single:
    pooled, lse = pooled[0], lse[0]
  return (pooled, lse) if return_lse else pooled
