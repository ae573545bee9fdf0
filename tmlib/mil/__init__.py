"""Multiple-instance learning: bags, pooling, attention baselines, metrics."""

from tmlib.mil.attention import AttentionScores
from tmlib.mil.bag import Bag, batch_bags, bucket_size, pad_bag, subsample_bag
from tmlib.mil.output import MILOutput
from tmlib.mil.pooling import (
  attention_pool,
  max_pool,
  mean_pool,
  weighted_pool,
)
from tmlib.mil.validate import make_bag, select_nonempty, validate_bag

__all__ = [
  'AttentionScores',
  'Bag',
  'MILOutput',
  'attention_pool',
  'batch_bags',
  'bucket_size',
  'make_bag',
  'max_pool',
  'mean_pool',
  'pad_bag',
  'select_nonempty',
  'subsample_bag',
  'validate_bag',
  'weighted_pool',
]
