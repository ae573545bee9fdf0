"""Multiple-instance learning: bags, attention models, metrics, baselines."""

from tmlib.mil.attention import AttentionScores
from tmlib.mil.bag import (
  Bag,
  batch_bags,
  bucket_size,
  make_bag,
  pad_bag,
  select_nonempty,
  subsample_bag,
  validate_bag,
)
from tmlib.mil.baselines import pooled_features, pooled_logistic
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.expression import (
  expression_summary,
  log_normalize,
  pearson_per_gene,
  pearson_per_sample,
  regression_method,
  spearman_per_gene,
  spot_regression_method,
  variable_genes,
)
from tmlib.mil.fold_data import cross_validation_runs, tag_runs
from tmlib.mil.method import (
  classification_loss,
  classification_method,
  scale_features,
)
from tmlib.mil.metrics import (
  auroc,
  average_precision,
  balanced_accuracy,
  classification_summary,
  cohen_kappa,
  confusion_matrix,
  log_loss,
  macro_f1,
  over_repeats,
  pool_out_of_fold,
  roc_curve,
)
from tmlib.mil.models import ABMIL, PoolMIL
from tmlib.mil.output import MILOutput, auxiliary_losses
from tmlib.mil.pooling import (
  attention_pool,
  max_pool,
  mean_pool,
  weighted_pool,
)
from tmlib.mil.registry import MODELS, ModelSpec, create_model, model_options
from tmlib.mil.soft_pooling import (
  log_sum_exp_pool,
  noisy_or_pool,
  top_k_pool,
)
from tmlib.mil.task_method import bag_method
from tmlib.mil.torch_checkpoints import TorchModel, from_torch

__all__ = [
  'ABMIL',
  'MODELS',
  'AttentionScores',
  'Bag',
  'MILOutput',
  'ModelSpec',
  'PoolMIL',
  'TorchModel',
  'attention_pool',
  'auroc',
  'auxiliary_losses',
  'average_precision',
  'bag_dropout',
  'bag_method',
  'balanced_accuracy',
  'batch_bags',
  'bucket_size',
  'classification_loss',
  'classification_method',
  'classification_summary',
  'cohen_kappa',
  'confusion_matrix',
  'create_model',
  'cross_validation_runs',
  'expression_summary',
  'from_torch',
  'log_loss',
  'log_normalize',
  'log_sum_exp_pool',
  'macro_f1',
  'make_bag',
  'max_pool',
  'mean_pool',
  'model_options',
  'noisy_or_pool',
  'over_repeats',
  'pad_bag',
  'pearson_per_gene',
  'pearson_per_sample',
  'pool_out_of_fold',
  'pooled_features',
  'pooled_logistic',
  'regression_method',
  'roc_curve',
  'scale_features',
  'select_nonempty',
  'spearman_per_gene',
  'spot_regression_method',
  'subsample_bag',
  'tag_runs',
  'top_k_pool',
  'validate_bag',
  'variable_genes',
  'weighted_pool',
]
