"""Sparse mixtures of experts: routers, balance, experts in one product each."""

from tmlib.moe.balance import (
  BalanceSums,
  balance_losses,
  balance_sums,
  losses_of_sums,
)
from tmlib.moe.experts import IMPLS, capacity_of, expert_mlp, kept
from tmlib.moe.layer import MoELayer
from tmlib.moe.parallel import parallel_expert_mlp
from tmlib.moe.routing import (
  ExpertChoice,
  Routing,
  expert_choice_route,
  group_route,
  topk_route,
  update_bias,
)

__all__ = [
  'IMPLS',
  'BalanceSums',
  'ExpertChoice',
  'MoELayer',
  'Routing',
  'balance_losses',
  'balance_sums',
  'capacity_of',
  'expert_choice_route',
  'expert_mlp',
  'group_route',
  'kept',
  'losses_of_sums',
  'parallel_expert_mlp',
  'topk_route',
  'update_bias',
]
