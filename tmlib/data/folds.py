"""Cross-validation folds, and statistics that see training bags only.

Axes: n bags, F folds, P features.
"""

from collections.abc import Sequence

import numpy as np

from tmlib.data.bag import Bag

__all__ = [
  'fold_statistics',
  'instance_statistics',
  'standardize',
  'stratified_folds',
]


def stratified_folds(
  labels: np.ndarray, num_folds: int, seed: int = 0
) -> np.ndarray:
  """Random folds over which every class is spread to within one bag.

  Bags are shuffled within their class and dealt to the folds in turn; the
  next class starts where the last one stopped, so fold sizes too differ by
  one at most.

  Args:
    labels: [n], any dtype that sorts.
    num_folds: F, in [2, n].
    seed: one seed is one repeat of the cross-validation.

  Returns:
    [n], int32 in [0, F): the fold in which each bag is tested.

  Raises:
    ValueError: F out of range.
  """
  labels = np.asarray(labels)
  n = len(labels)
  if not 2 <= num_folds <= n:
    raise ValueError(
      f'num_folds must be in [2, {n}], the number of bags; got {num_folds}'
    )
  rng = np.random.default_rng(seed)
  shuffled = rng.permutation(n)
  dealt = shuffled[np.argsort(labels[shuffled], kind='stable')]
  folds = np.empty(n, np.int32)
  # Which physical fold gets the larger share is random as well.
  folds[dealt] = rng.permutation(num_folds)[np.arange(n) % num_folds]
  return folds


def instance_statistics(
  bags: Sequence[Bag], index: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Mean and standard deviation of the features over all instances.

  Args:
    bags: n bags.
    index: the bags to look at, for example the training bags; None is all.

  Returns:
    mean: [P], float32.
    std: [P], float32, one where a feature is constant (so that dividing by it
      leaves a zero).

  Raises:
    ValueError: no instance at all.
  """
  chosen = range(len(bags)) if index is None else np.asarray(index)
  table = np.concatenate(
    [np.asarray(bags[i].features)[np.asarray(bags[i].mask)] for i in chosen]
    or [np.zeros((0, 1))]
  ).astype(np.float64)
  if not len(table):
    raise ValueError('no instance to compute statistics from')
  mean, std = table.mean(0), table.std(0)
  # A constant column has a std of rounding size, not of zero.
  constant = std <= 1e-7 * np.maximum(np.abs(mean), 1e-30)
  std = np.where(constant, 1, std)
  return mean.astype(np.float32), std.astype(np.float32)


def fold_statistics(
  bags: Sequence[Bag], folds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Statistics for each fold of the bags that it trains on.

  Keep them as constants next to the model and select row `batch['fold']`
  (see `tmlib.mil.classification_method`, argument `statistics`): the table of
  features is then stored once for all folds, and no test bag has any part in
  how its own fold is scaled.

  Args:
    bags: n bags.
    folds: [n], the fold in which each bag is tested, in [0, F).

  Returns:
    mean, std: [F, P], float32, of the bags outside each fold.
  """
  folds = np.asarray(folds)
  pairs = [
    instance_statistics(bags, np.flatnonzero(folds != f))
    for f in range(int(folds.max()) + 1)
  ]
  means, stds = zip(*pairs, strict=True)
  return np.stack(means), np.stack(stds)


def standardize(bags: Sequence[Bag], train_index: np.ndarray) -> list[Bag]:
  """(x - mean) / std with the statistics of the training bags only.

  Args:
    bags: n bags, training and test.
    train_index: indices of the training bags; the others do not contribute.

  Returns:
    n bags, features float32; padded instances stay zero.
  """
  mean, std = instance_statistics(bags, train_index)

  def scaled(bag):
    features = (np.asarray(bag.features, np.float32) - mean) / std
    return bag.replace(features=np.where(bag.mask[:, None], features, 0))

  return [scaled(bag) for bag in bags]
