"""Bags, under the name where users of this family look for them.

The container itself lives in `tmlib.data`: readers return bags, and nothing
in `tmlib.data` may import a family.
"""

from tmlib.data.bag import Bag, batch_bags, bucket_size, pad_bag, subsample_bag
from tmlib.data.validate import make_bag, select_nonempty, validate_bag

__all__ = [
  'Bag',
  'batch_bags',
  'bucket_size',
  'make_bag',
  'pad_bag',
  'select_nonempty',
  'subsample_bag',
  'validate_bag',
]
