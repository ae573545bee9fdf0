"""Block sizes: tables per chip, static estimates, and a search over them."""

from kernels_pallas.tuning.cases import Case, all_cases
from kernels_pallas.tuning.chips import CHIPS, Chip
from kernels_pallas.tuning.kernels import find_kernels
from kernels_pallas.tuning.profiles import Profile, profile
from kernels_pallas.tuning.search import Ranked, autotune
from kernels_pallas.tuning.table import find_blocks

__all__ = [
  'CHIPS',
  'Case',
  'Chip',
  'Profile',
  'Ranked',
  'all_cases',
  'autotune',
  'find_blocks',
  'find_kernels',
  'profile',
]
