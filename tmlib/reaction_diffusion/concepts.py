r"""The concept field: what each patch looks like, in words or in clusters.

Axes: ... leading axes, N patches, P features, Q dimensions of a text space, M
concepts.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.reaction_diffusion.transport import align

__all__ = [
  'MAX_SCALE',
  'check_concept_matrix',
  'concept_field',
  'similarity_logits',
  'unit_rows',
]

# Largest inverse temperature of cosine similarities, as in CLIP.
MAX_SCALE = 100.0


def unit_rows(x: jax.Array) -> jax.Array:
  """Unit rows, x / |x| along the last axis; a zero row stays zero.

  Args:
    x: [..., Q], float.

  Returns:
    [..., Q].
  """
  square = jnp.sum(x * x, -1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.where(square > 0, square, 1))


def similarity_logits(
  embeddings: jax.Array, concept_matrix: jax.Array, log_scale: jax.Array
) -> jax.Array:
  r"""Scaled cosines: l_im = min(exp(log_scale), 100) <C_i, T_m>.

  Args:
    embeddings: [..., N, Q], C; rows are normalised here.
    concept_matrix: [M, Q], T, unit rows.
    log_scale: [], log of the inverse temperature.

  Returns:
    [..., N, M].
  """
  scale = jnp.exp(jnp.minimum(log_scale, np.log(MAX_SCALE)))
  cosine = jnp.einsum('...nq,mq->...nm', unit_rows(embeddings), concept_matrix)
  return scale * cosine


def concept_field(
  logits: jax.Array,
  mask: jax.Array,
  *,
  activation: str = 'softmax',
  bias: jax.Array | None = None,
) -> jax.Array:
  r"""Concept field Z from logits.

  'softmax': z_i on the simplex, for concepts that exclude one another;
  'sigmoid': z_i in [0, 1]^M, for concepts that may hold together. Both sets
  are preserved by the evolution (fact S1).

  Args:
    logits: [..., N, M].
    mask: [..., N], bool.
    activation: 'softmax' or 'sigmoid'.
    bias: [M], for 'sigmoid' only, or None.

  Returns:
    [..., N, M]; zeros outside the mask.

  Raises:
    ValueError: unknown activation, or a bias on a softmax.
  """
  if activation == 'sigmoid':
    shift = 0.0 if bias is None else align(bias, logits.ndim)
    z = jax.nn.sigmoid(logits + shift)
  elif activation == 'softmax':
    if bias is not None:
      raise ValueError(
        "activation='softmax' takes no bias: one that is common to all "
        'concepts changes nothing and would drift; pass bias=None'
      )
    z = jax.nn.softmax(logits, axis=-1)
  else:
    raise ValueError(
      f'activation={activation!r} is unknown; allowed: softmax, sigmoid'
    )
  return jnp.where(mask[..., None], z, 0)


def check_concept_matrix(matrix: Any, dim: int | None = None) -> np.ndarray:
  """Checks a matrix of concept embeddings on the host.

  Args:
    matrix: [M, Q], one text embedding per row.
    dim: Q that the patches have; None accepts any.

  Returns:
    [M, Q] float32 with unit rows; a matrix that had others is normalised with
    a warning.

  Raises:
    ValueError: not a matrix, no rows, wrong Q, NaN or infinite entries, or a
      row of zeros.
  """
  matrix = np.asarray(matrix, np.float32)
  if matrix.ndim != 2:
    raise ValueError(
      f'concept_matrix has shape {matrix.shape}, expected [M, Q]: one row of '
      'text embedding per concept'
    )
  if matrix.shape[0] == 0:
    raise ValueError(
      'concept_matrix has M=0 concepts; give at least one row, or use '
      "concept_mode='learned' or 'none'"
    )
  if dim is not None and matrix.shape[1] != dim:
    raise ValueError(
      f'concept_matrix has Q={matrix.shape[1]} columns but the patch '
      f'embeddings have {dim}; take both from one vision-language encoder, or '
      "use concept_mode='projected'"
    )
  bad = np.flatnonzero(~np.isfinite(matrix).all(1))
  if bad.size:
    raise ValueError(
      f'concept_matrix has NaN or infinite entries in rows {bad[:5].tolist()} '
      f'({bad.size} in all); encode those concepts again'
    )
  norm = np.linalg.norm(matrix, axis=1, keepdims=True)
  zero = np.flatnonzero(norm[:, 0] == 0)
  if zero.size:
    raise ValueError(
      f'concept_matrix has zero rows {zero[:5].tolist()}, which have no '
      'direction; remove them'
    )
  if np.abs(norm - 1).max() > 1e-3:
    warnings.warn(
      f'concept_matrix rows have norms in [{norm.min():.3g}, {norm.max():.3g}]'
      '; normalising them to one',
      stacklevel=2,
    )
  return matrix / norm
