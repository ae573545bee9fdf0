"""Unlearning judged by its output-space gap to retraining."""

from tmlib.unlearning.data import request_data
from tmlib.unlearning.diagnostics import (
  LeverageReport,
  audit,
  recommend,
  standard_specs,
)
from tmlib.unlearning.dynamics import (
  Gap,
  closed_form_gap,
  critical_weight,
  optimal_scalar_step,
  simulate,
  simulate_npo,
  stopping_time,
)
from tmlib.unlearning.ggn import (
  Solver,
  ggn_matvec,
  linearize,
  predict_gap,
  retain_displacement,
  stationarity,
)
from tmlib.unlearning.leverage import (
  Leverage,
  cross_leverage,
  downdate,
  leverage,
  loo_residual,
)
from tmlib.unlearning.losses import Loss, convex, get_loss
from tmlib.unlearning.method import (
  KINDS,
  Weights,
  needs,
  newton_cg,
  unlearner,
)
from tmlib.unlearning.metrics import (
  centre,
  forget_quality_ks,
  gap_norm,
  kl_to_retrained,
  membership_auc,
  relative_error,
  truth_ratio,
)
from tmlib.unlearning.netaudit import audit_network
from tmlib.unlearning.problem import (
  RidgeProblem,
  check_problem,
  duplicates,
  fit_full,
  fit_retain,
  weigh,
)
from tmlib.unlearning.spec import (
  UnlearnSpec,
  corrected_relabel,
  corrected_targets,
  graddiff,
  gradient_ascent,
  influence,
  lora,
  neggrad_plus,
  npo_weights,
  projected,
  relabel,
  retain_finetune,
  retain_newton,
  retain_null,
  scrub,
  sum_weight,
  woodbury_influence,
)
