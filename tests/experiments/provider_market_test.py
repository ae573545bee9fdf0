"""The provider market's report, from the config to the tables."""

import csv
import importlib.util
import pathlib

import numpy as np
import pytest

from experiments import provider_market, provider_market_report
from tmlib import market, train

ROOT = pathlib.Path(__file__).resolve().parents[2]


def config_of(arg=None):
  path = ROOT / 'configs' / 'provider_market.py'
  spec = importlib.util.spec_from_file_location('provider_market', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(arg)


def test_draws_stay_in_their_ranges_and_do_not_repeat():
  config = config_of('tiny')
  config.draws.games = 40
  games = provider_market.draw_games(config, 'wardrop', 'power_law')
  budgets = np.array([g.budgets for g in games])
  gamma = np.array([float(g.gamma) for g in games])
  ratio = budgets[:, 1] / budgets[:, 0]
  assert ((ratio > 0.02) & (ratio < 0.98)).all()
  assert ((gamma >= 0.1) & (gamma <= 10)).all()
  assert len(set(gamma)) == 40
  assert all(g.wardrop for g in games)
  again = provider_market.draw_games(config, 'wardrop', 'power_law')
  np.testing.assert_array_equal(budgets, [g.budgets for g in again])


def test_tables_count_every_exception():
  games = [market.ProviderGame(budgets=(2.0, 1.0))] * 4
  yes, no = np.ones(4, bool), np.array([True, False, False, True])
  found = {
    'U': np.zeros(4),
    'kind': np.array(['interior', 'monopoly', 'monopoly', 'interior']),
    'claim_i': no,
    'claim_ii': np.array([True, True, False, False]),
    'claim_iii': yes,
    'eps_nash': np.full(4, 1e-12),
  }
  draws = {('wardrop', 'log1p'): (games, found)}
  _, row = provider_market_report.claim_rows(draws)
  assert row[3] == '50.0%'
  assert row[4].startswith('50.0%')
  assert '(100.0%)' in row[4]
  assert row[6].startswith('100.0%')
  _, *rows = provider_market_report.exception_rows(draws)
  kinds = {(r[2], r[3]): r[4] for r in rows}
  assert kinds == {
    ('interior', 'ii'): '1',
    ('monopoly', 'i'): '1',
    ('monopoly', 'i, ii'): '1',
  }


@pytest.mark.parametrize(
  ('field', 'value', 'match'),
  [('users', ('wardrob',), 'wardrob'), ('networks', ('chicago',), 'chicago')],
)
def test_bad_values_are_named(field, value, match):
  config = config_of('tiny')
  config[field] = value
  with pytest.raises(ValueError, match=match):
    provider_market.measure(config)


@pytest.mark.slow
def test_tiny_leaves_its_report(tmp_path):
  config = config_of('tiny')
  assert train.run(provider_market.make, config, workdir=tmp_path) == 0
  out = tmp_path / 'report'
  with (out / 'claims.csv').open() as file:
    (row,) = csv.DictReader(file)
  assert row['games'] == '10'
  text = (out / 'market.md').read_text()
  assert '| 0.6 | 0.505 | 0.2457 | 0.2650 |' in text
  assert 'What may be concluded' in text
  pictures = {path.name for path in out.glob('*.png')}
  assert pictures == {
    'claims.png', 'decomposition.png', 'fixed_total.png', 'sweep.png',
  }  # fmt: skip
