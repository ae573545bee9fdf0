"""Providers who split compute between training and serving, and their users."""

from tmlib.market.accuracy import ACCURACIES, Log1p, Michaelis, PowerLaw
from tmlib.market.calibration import Calibration, calibrate
from tmlib.market.envelope import envelope_equilibrium
from tmlib.market.game import ProviderGame, stack_games
from tmlib.market.latency import LATENCIES, Latency, bpr
from tmlib.market.method import MarketState, market_method
from tmlib.market.nash import NashResult, equilibria, solve_games, solve_nash
from tmlib.market.network import LinkCurve, NetworkEq, wardrop_network
from tmlib.market.population import user_mfg
from tmlib.market.pricing import PriceResult, solve_prices
from tmlib.market.response import BestResponse, best_response
from tmlib.market.sweep import (
  asymmetry_sweep,
  compare_budgets,
  uncongested_share,
)
from tmlib.market.users import UserEq, split_users, user_equilibrium
from tmlib.market.welfare import (
  PriceOfAnarchy,
  price_of_anarchy,
  total_welfare,
)

__all__ = [
  'ACCURACIES',
  'LATENCIES',
  'BestResponse',
  'Calibration',
  'Latency',
  'LinkCurve',
  'MarketState',
  'Log1p',
  'Michaelis',
  'NashResult',
  'NetworkEq',
  'PowerLaw',
  'PriceOfAnarchy',
  'PriceResult',
  'ProviderGame',
  'UserEq',
  'asymmetry_sweep',
  'best_response',
  'bpr',
  'calibrate',
  'compare_budgets',
  'envelope_equilibrium',
  'equilibria',
  'market_method',
  'price_of_anarchy',
  'solve_games',
  'solve_nash',
  'solve_prices',
  'split_users',
  'stack_games',
  'total_welfare',
  'uncongested_share',
  'user_equilibrium',
  'user_mfg',
  'wardrop_network',
]
