"""Mean-field games: populations, best responses, equilibria."""

from tmlib.mean_field import envs
from tmlib.mean_field.dynamics import (
  StationaryFlow,
  best_response,
  expected_return,
  exploitability,
  optimal_q_values,
  population_exploitability,
  push,
  q_values,
  stationary_flow,
  uniform_policy,
)
from tmlib.mean_field.game import MFGame, make_game, union

__all__ = [
  'MFGame',
  'StationaryFlow',
  'best_response',
  'envs',
  'expected_return',
  'exploitability',
  'make_game',
  'optimal_q_values',
  'population_exploitability',
  'push',
  'q_values',
  'stationary_flow',
  'uniform_policy',
  'union',
]
