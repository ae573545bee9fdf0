r"""Gene expression: a regression of bags, its metrics and its normalisation.

Axes: n samples (bags or spots), G genes, B rows of a batch.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tmlib.mil.task_method import bag_method, weighted_auxiliary
from tmlib.ops.statistics import midranks
from tmlib.train.method import Build

__all__ = [
  'expression_summary',
  'log_normalize',
  'pearson_per_gene',
  'pearson_per_sample',
  'regression_method',
  'spearman_per_gene',
  'spot_regression_method',
  'variable_genes',
]


def regression_method(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  center: Any,
  scale: Any,
  aux_weights: Mapping[str, float] | None = None,
  **options: Any,
) -> Build:
  r"""Trains by the mean squared error of standardised targets.

  l_b = mean_g (x_bg - (y_bg - m_g) / s_g)^2; predictions are x s + m.

  Batch, beside what `bag_method` reads: 'target' [B, G] float32.

  Args:
    model: with G logits.
    optimizer: Optax transformation.
    center: m [G], of the training bags.
    scale: s [G], of the training bags, positive.
    aux_weights: lambda of auxiliary losses.
    **options: of `bag_method`.

  Returns:
    Build. Metrics: loss, standardized_mse, aux/<name>. Outputs: id,
    prediction and target [B, G].

  Raises:
    ValueError: a scale that is not positive.
  """
  center = np.atleast_2d(np.asarray(center, np.float32))
  scale = np.atleast_2d(np.asarray(scale, np.float32))
  if not (np.isfinite(scale) & (scale > 0)).all():
    raise ValueError('scale must be positive; give 1 for constant targets')

  def task(output, batch, axis_name):
    del axis_name  # a sum over bags
    weight = batch['weight']
    target = (batch['target'] - center) / scale
    mse = lambda x: jnp.mean((x.astype(jnp.float32) - target) ** 2, -1)
    own = mse(output.logits)
    extra, each = weighted_auxiliary(output, aux_weights or {}, mse)

    def total(values):
      # where, not multiply: whatever an empty slot holds must not matter.
      values = jnp.where(weight > 0, values, 0)
      return jnp.sum(values * weight), jnp.sum(weight)

    metrics = {'standardized_mse': total(own)}
    metrics |= {f'aux/{name}': total(x) for name, x in each.items()}
    prediction = output.logits.astype(jnp.float32) * scale + center
    found = {'prediction': prediction, 'target': batch['target']}
    return total(own + extra), metrics, found

  return bag_method(model, optimizer, task, **options)


def spot_regression_method(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  aux_weights: Mapping[str, float] | None = None,
  outputs: tuple[str, ...] = (),
  **options: Any,
) -> Build:
  r"""Trains a prediction for every instance, such as a spot of a section.

  The mean of (x_bng - y_bng)^2 over the genes and over all real instances; bags
  count by their size.

  Batch, beside what `bag_method` reads: 'target' [B, N, G] float32, already
  standardised by the training bags.

  Args:
    model: reports `extras['node_outputs']` [B, N, G], as
      TMEvolve(task='expression').
    optimizer: Optax transformation.
    aux_weights: lambda of auxiliary losses.
    outputs: further extras [B, ...] to return, traced where need be.
    **options: of `bag_method`.

  Returns:
    Build. Metrics: loss, spot_mse, aux/<name>. Outputs: id, prediction [B, N,
    G] and what `outputs` asks for.

  Raises:
    ValueError: when traced, a model without a prediction per instance.
  """

  def task(output, batch, axis_name):
    del axis_name  # a sum over instances
    if 'node_outputs' not in output.extras:
      raise ValueError(
        'the model predicts bags only; spots need one that reports '
        "node_outputs, such as TMEvolve(task='expression')"
      )
    mask, weight = jnp.asarray(batch['bag'].mask), batch['weight']
    found = output.extras['node_outputs'].astype(jnp.float32)
    real = mask & (weight > 0)[:, None]
    # where, not multiply: whatever an empty slot holds must not matter.
    error = jnp.where(real[..., None], found - batch['target'], 0)
    share = real * weight[:, None]
    own = jnp.mean(error**2, -1) * share
    extra, each = weighted_auxiliary(
      output, aux_weights or {}, lambda logits: jnp.zeros(logits.shape[:-1])
    )
    total = lambda x: (
      jnp.sum(jnp.where(weight > 0, x, 0) * share.sum(1)),
      share.sum(),
    )
    metrics = {'spot_mse': (own.sum(), share.sum())}
    metrics |= {f'aux/{name}': total(x) for name, x in each.items()}
    loss = own.sum() + total(extra)[0], share.sum()
    # Training does not trace, and drops what is returned here.
    more = {k: output.extras[k] for k in outputs if k in output.extras}
    return loss, metrics, {'prediction': found} | more

  return bag_method(model, optimizer, task, trace=bool(outputs), **options)


def pearson_per_gene(targets: Any, predictions: Any) -> np.ndarray:
  """Pearson correlation of each gene over the samples.

  Args:
    targets: [n, G].
    predictions: [n, G].

  Returns:
    [G] float64; NaN where target or prediction is constant.

  Raises:
    ValueError: shapes that differ, or values that are not finite.
  """
  y, x = _checked(targets, predictions)
  return _correlation(y, x)


def pearson_per_sample(targets: Any, predictions: Any) -> np.ndarray:
  """Pearson correlation of each sample over the genes, [n] float64."""
  y, x = _checked(targets, predictions)
  return _correlation(y.T, x.T)


def spearman_per_gene(targets: Any, predictions: Any) -> np.ndarray:
  """Correlation of midranks of each gene, [G] float64; NaN where constant."""
  y, x = _checked(targets, predictions)
  ranks = lambda table: np.stack([midranks(column) for column in table.T], 1)
  return _correlation(ranks(y), ranks(x))


def expression_summary(
  targets: Any, predictions: Any, top: int = 50
) -> dict[str, float]:
  """The metrics that one puts in a table.

  A gene that is constant in targets or predictions has no correlation: it is
  left out of the means and counted, never taken as 0.

  Args:
    targets: [n, G].
    predictions: [n, G].
    top: genes of `pearson_top`, the best of them.

  Returns:
    pearson, pearson_top, pearson_samples, spearman, r2 (mean over genes that
    vary), mae, mse, constant_genes.
  """
  y, x = _checked(targets, predictions)
  gene = _correlation(y, x)
  defined = gene[np.isfinite(gene)]
  best = np.sort(defined)[::-1][:top]
  spread = ((y - y.mean(0)) ** 2).sum(0)
  varies = spread > 0
  r2 = 1 - ((y - x) ** 2).sum(0)[varies] / spread[varies]
  return {
    'pearson': _mean(defined),
    'pearson_top': _mean(best),
    'pearson_samples': _mean(_correlation(y.T, x.T)),
    'spearman': _mean(spearman_per_gene(y, x)),
    'r2': _mean(r2),
    'mae': float(np.abs(y - x).mean()),
    'mse': float(((y - x) ** 2).mean()),
    'constant_genes': float(len(gene) - len(defined)),
  }


def log_normalize(counts: Any, total: float = 1e4) -> np.ndarray:
  """log(1 + total * c_ig / sum_g c_ig).

  Args:
    counts: [n, G], at least 0.
    total: library size that every sample is brought to.

  Returns:
    [n, G] float64; zeros for a sample without counts.

  Raises:
    ValueError: negative counts.
  """
  counts = np.asarray(counts, np.float64)
  if (counts < 0).any():
    raise ValueError('counts must be at least 0; are they normalised already?')
  size = counts.sum(1, keepdims=True)
  return np.log1p(total * counts / np.where(size > 0, size, 1))


def variable_genes(values: Any, count: int) -> np.ndarray:
  """The genes with the largest variance; look at training samples alone.

  Args:
    values: [n, G], log-normalised.
    count: genes wanted.

  Returns:
    [count] int64, by decreasing variance; ties by index.

  Raises:
    ValueError: more genes wanted than there are.
  """
  variance = np.asarray(values, np.float64).var(0)
  if not 1 <= count <= len(variance):
    raise ValueError(f'count={count} must be in [1, {len(variance)}]')
  return np.argsort(-variance, kind='stable')[:count]


def _checked(targets, predictions):
  y, x = np.asarray(targets, np.float64), np.asarray(predictions, np.float64)
  if y.ndim != 2 or y.shape != x.shape or not len(y):
    raise ValueError(
      f'targets {y.shape} and predictions {x.shape} must both be [n, G]'
    )
  if not (np.isfinite(y).all() and np.isfinite(x).all()):
    raise ValueError('targets and predictions must be finite')
  return y, x


def _correlation(y, x):
  """Of each column; NaN where one side is constant."""
  y, x = y - y.mean(0), x - x.mean(0)
  size = np.sqrt((y**2).sum(0) * (x**2).sum(0))
  # Rounding leaves a constant column a little off its mean.
  tiny = 1e-12 * len(y)
  flat = ((y**2).sum(0) < tiny**2) | ((x**2).sum(0) < tiny**2)
  with np.errstate(invalid='ignore', divide='ignore'):
    return np.where(flat, np.nan, (y * x).sum(0) / size)


def _mean(values):
  values = values[np.isfinite(values)]
  return float(values.mean()) if len(values) else float('nan')
