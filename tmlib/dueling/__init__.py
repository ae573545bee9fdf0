"""Fair multi-user dueling bandits: Nash-welfare learning from comparisons."""

from tmlib.dueling.borda import (
  BordaEstimate,
  Tally,
  borda_estimate,
  borda_scores,
  estimate_from_tally,
  tally_votes,
)
from tmlib.dueling.design import Design, optimal_design, round_design
from tmlib.dueling.elimination import (
  EliminationResult,
  eliminate,
  fair_elimination,
)
from tmlib.dueling.envs import Duel, DuelingEnv, duel, make_env
from tmlib.dueling.etc import EtcResult, fair_etc
from tmlib.dueling.glm import GlmEnv, GlmFit, glm_env, glm_mle, link_mean
from tmlib.dueling.glm_etc import GlmEtcResult, fair_glm_etc
from tmlib.dueling.greedy import GreedyResult, fair_eps_greedy
from tmlib.dueling.instances import (
  cyclic_instance,
  easy_instance,
  glm_cyclic_instance,
  glm_hard_instance,
  hard_instance,
  random_instance,
)
from tmlib.dueling.method import SimulationState, bandit_method, play
from tmlib.dueling.nsw import Solution, maximize_welfare, solve_nsw
from tmlib.dueling.planning import Plan, plan, preference_from_scores
from tmlib.dueling.policies import POLICIES
from tmlib.dueling.pooling import (
  Pooled,
  VotePreferences,
  beta_strength,
  choose_strength,
  from_votes,
  pool_users,
)
from tmlib.dueling.regret import Regret
from tmlib.dueling.theory import (
  Bound,
  Exponent,
  etc_tau,
  fit_exponent,
  lower_bound,
  upper_bound,
)
from tmlib.dueling.votes import (
  Votes,
  bootstrap_votes,
  read_votes,
  split_votes,
  tally_ratings,
  tally_table,
  trim_votes,
)
from tmlib.dueling.welfare import KINDS, nash_welfare, user_utility

__all__ = [
  'KINDS',
  'POLICIES',
  'BordaEstimate',
  'Bound',
  'Design',
  'Duel',
  'DuelingEnv',
  'EliminationResult',
  'EtcResult',
  'Exponent',
  'GlmEnv',
  'GlmEtcResult',
  'GlmFit',
  'GreedyResult',
  'Plan',
  'Pooled',
  'Regret',
  'SimulationState',
  'Solution',
  'Tally',
  'VotePreferences',
  'Votes',
  'bandit_method',
  'beta_strength',
  'bootstrap_votes',
  'borda_estimate',
  'borda_scores',
  'choose_strength',
  'cyclic_instance',
  'duel',
  'easy_instance',
  'eliminate',
  'estimate_from_tally',
  'etc_tau',
  'fair_elimination',
  'fair_eps_greedy',
  'fair_etc',
  'fair_glm_etc',
  'fit_exponent',
  'from_votes',
  'glm_cyclic_instance',
  'glm_env',
  'glm_hard_instance',
  'glm_mle',
  'hard_instance',
  'link_mean',
  'lower_bound',
  'make_env',
  'maximize_welfare',
  'nash_welfare',
  'optimal_design',
  'plan',
  'play',
  'pool_users',
  'preference_from_scores',
  'random_instance',
  'read_votes',
  'round_design',
  'solve_nsw',
  'split_votes',
  'tally_ratings',
  'tally_table',
  'tally_votes',
  'trim_votes',
  'upper_bound',
  'user_utility',
]
