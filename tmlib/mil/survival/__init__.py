"""Survival: losses that never saturate, curves, and metrics under censoring."""

from tmlib.mil.survival.bins import digitize, quantile_bins
from tmlib.mil.survival.concordance import (
  Pairs,
  concordance_index,
  concordance_index_ipcw,
  concordance_pairs,
  concordance_sums,
)
from tmlib.mil.survival.curves import (
  KaplanMeier,
  LogRank,
  kaplan_meier,
  logrank,
)
from tmlib.mil.survival.linear import (
  LinearCox,
  linear_cox,
  select_cox_penalty,
)
from tmlib.mil.survival.losses import (
  cox_nll,
  cox_sums,
  discrete_nll,
  hazards_to_survival,
  risk_score,
)
from tmlib.mil.survival.method import cox_method, discrete_survival_method
from tmlib.mil.survival.scores import (
  TimeAUC,
  brier_score,
  cumulative_dynamic_auc,
  integrated_brier_score,
)

__all__ = [
  'KaplanMeier',
  'LinearCox',
  'LogRank',
  'Pairs',
  'TimeAUC',
  'brier_score',
  'concordance_index',
  'concordance_index_ipcw',
  'concordance_pairs',
  'concordance_sums',
  'cox_method',
  'cox_nll',
  'cox_sums',
  'cumulative_dynamic_auc',
  'digitize',
  'discrete_nll',
  'discrete_survival_method',
  'hazards_to_survival',
  'integrated_brier_score',
  'kaplan_meier',
  'linear_cox',
  'logrank',
  'quantile_bins',
  'risk_score',
  'select_cox_penalty',
]
