"""Pathway survival: blocks, folds, concordance; one tiny run end to end."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import tmevolve_survival as runner
from experiments import tmevolve_survival_report as report
from tmlib.mil.survival import concordance_pairs

ROOT = pathlib.Path(__file__).resolve().parents[2]
TCGA = ROOT.parent / 'shared' / 'data' / 'tcga'


@pytest.fixture
def config():
  path = ROOT / 'configs' / 'tmevolve_survival.py'
  spec = importlib.util.spec_from_file_location('tmevolve_survival', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config('tiny')


def test_each_pathway_has_its_own_block(config):
  study = runner.load_study(config)
  values = study.components[:3, 0]
  bag = runner.fold_bags(jnp.asarray(values), study.graph)
  nodes, size = values.shape[1:]
  assert bag.features.shape == (3, nodes, nodes * (1 + size))
  blocks = np.array(bag.features).reshape(3, nodes, nodes, 1 + size)
  for i in range(nodes):
    np.testing.assert_array_equal(blocks[:, i, i, 0], 1)
    np.testing.assert_array_equal(blocks[:, i, i, 1:], values[:, i])
    blocks[:, i, i] = 0
  assert not blocks.any()


def test_runs_train_and_test_on_their_own_fold(config):
  config.train.runs = 2
  study = runner.load_study(config)
  part = runner.make(config).parts['tmevolve']
  folds = len(study.cohort.test)
  assert part.runs == 2 * folds
  batch = part.data.load(0, slice(0, part.data.batch_size))
  held = part.evaluations['test']
  tested = held.load(0, slice(0, held.batch_size))
  for run in range(part.runs):
    used = batch['index'][run][batch['weight'][run] > 0]
    assert study.cohort.train[run % folds][used].all()
    seen = tested['index'][run][tested['weight'][run] > 0]
    np.testing.assert_array_equal(
      np.sort(seen), np.flatnonzero(study.cohort.test[run % folds])
    )


def test_a_run_reads_the_components_of_its_fold(config):
  study = runner.load_study(config)
  data = runner.make(config).parts['tmevolve'].data
  batch = jax.tree.map(lambda x: x[1], data.load(0, slice(0, 4)))
  found = data.gather(jax.tree.map(jnp.asarray, data.resident), batch)
  want = runner.fold_bags(study.components[batch['index'], 1], study.graph)
  np.testing.assert_array_equal(found['bag'].features, want.features)
  np.testing.assert_array_equal(
    found['bin'], data.resident['bin'][batch['index'], 1]
  )


def test_concordance_compares_within_folds_only():
  rng = np.random.default_rng(0)
  time, event = np.ceil(rng.exponential(5, 40)), rng.random(40) < 0.6
  risk, fold = rng.normal(size=(40, 2)).round(1), rng.integers(0, 3, 40)
  found = report.fold_concordance(np.stack([time, event, fold], 1), risk)
  seeds = []
  for column in risk.T:
    pairs = [
      concordance_pairs(time[fold == f], event[fold == f], column[fold == f])
      for f in range(3)
    ]
    good = sum(p.concordant + p.tied / 2 for p in pairs)
    seeds.append(good / sum(p.comparable for p in pairs))
  np.testing.assert_allclose(found, np.mean(seeds), rtol=1e-12)
  risk[3, 1] = np.nan
  targets = np.stack([time, event, fold], 1)
  assert np.isnan(report.fold_concordance(targets, risk))


def test_linear_risks_find_the_planted_pathways(config):
  config.data.synthetic = 400
  study = runner.load_study(config)
  targets = report._targets(study)
  for name, risk in report.linear_risks(config, study).items():
    if 'pathways' in name:
      assert report.fold_concordance(targets, risk) > 0.65, name


@pytest.mark.parametrize(
  ('field', 'value', 'error', 'match'),
  [
    ('data.synthetic', 0, ValueError, 'data.dir is empty.*:tiny'),
    ('data.dir', '/no/such', FileNotFoundError, 'no folder.*SurvPath'),
    ('data.components', 0, ValueError, '^data.components'),
    ('data.neighbours', 0, ValueError, '^data.neighbours'),
    ('train.runs', 0, ValueError, 'train.runs=0'),
    ('models', ('tmevolv',), ValueError, "models has 'tmevolv'"),
    ('models', ('vila_mil',), ValueError, "models has 'vila_mil'"),
  ],
)
def test_a_wrong_field_is_named(config, field, value, error, match):
  config.update_from_flattened_dict({field: value})
  with pytest.raises(error, match=match):
    runner.make(config)


@pytest.mark.skipif(not TCGA.is_dir(), reason=f'no public tables at {TCGA}')
def test_the_published_folds_and_a_known_figure(config):
  config.data.update(dir=str(TCGA), components=1)
  config.linear.update(genes=20, penalties=(100.0, 300.0))
  study = runner.load_study(config)
  assert len(study.cohort.cases) == 318
  assert study.cohort.event.sum() == 120
  assert study.cohort.missing == ('TCGA-CD-A487',)
  assert study.cohort.test.sum(1).tolist() == [42, 56, 101, 45, 74]
  # 20 components and a ridge gave .596 elsewhere, with another penalty.
  risk = next(iter(report.linear_risks(config, study).values()))
  found = np.mean(report._by_fold(study, risk))
  assert abs(found - 0.596) < 0.02
