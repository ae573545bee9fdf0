"""Mean-field games: populations, best responses, equilibria."""

from tmlib.mean_field import envs
from tmlib.mean_field.dynamics import (
  best_response,
  expected_return,
  exploitability,
  optimal_q_values,
  population_exploitability,
  push,
  q_values,
  stationary_flow,
)
from tmlib.mean_field.game import MFGame, make_game, union
from tmlib.mean_field.operators import StationaryFlow, uniform_policy
from tmlib.mean_field.solvers import (
  SolveResult,
  fictitious_play,
  fixed_point,
  mf_omo,
  online_mirror_descent,
  prior_descent,
)

__all__ = [
  'MFGame',
  'SolveResult',
  'StationaryFlow',
  'best_response',
  'envs',
  'expected_return',
  'exploitability',
  'fictitious_play',
  'fixed_point',
  'make_game',
  'mf_omo',
  'online_mirror_descent',
  'optimal_q_values',
  'population_exploitability',
  'prior_descent',
  'push',
  'q_values',
  'stationary_flow',
  'uniform_policy',
  'union',
]
