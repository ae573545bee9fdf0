"""Mean-field games: populations, best responses, equilibria."""

from tmlib.mean_field import envs
from tmlib.mean_field.agents import (
  CRITICAL_TEMPERATURE,
  AgentEnv,
  ising_env,
  magnetisation,
  player_env,
)
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
from tmlib.mean_field.equilibria import Equilibrium, find_equilibria
from tmlib.mean_field.game import MFGame, make_game, stack_games, union
from tmlib.mean_field.mean_action import mf_ac_method, mf_q_method
from tmlib.mean_field.method import solver_method
from tmlib.mean_field.munchausen import munchausen_method
from tmlib.mean_field.n_player import (
  NPlayerGame,
  deviation_gain,
  n_player_exploitability,
  simulate,
  to_n_player,
)
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
  'CRITICAL_TEMPERATURE',
  'AgentEnv',
  'Equilibrium',
  'MFGame',
  'NPlayerGame',
  'SolveResult',
  'StationaryFlow',
  'best_response',
  'deviation_gain',
  'envs',
  'expected_return',
  'exploitability',
  'fictitious_play',
  'find_equilibria',
  'fixed_point',
  'ising_env',
  'magnetisation',
  'make_game',
  'mf_ac_method',
  'mf_omo',
  'mf_q_method',
  'munchausen_method',
  'n_player_exploitability',
  'online_mirror_descent',
  'optimal_q_values',
  'player_env',
  'population_exploitability',
  'prior_descent',
  'push',
  'q_values',
  'simulate',
  'solver_method',
  'stack_games',
  'stationary_flow',
  'to_n_player',
  'uniform_policy',
  'union',
]
