"""The curve over noise and thickness: data per run, reports, learning."""

import csv
import importlib.util
import pathlib

import numpy as np
import pytest

from experiments import capsule, planted
from tmlib import train

ROOT = pathlib.Path(__file__).resolve().parents[2]


def config_of(name, arg=None):
  path = ROOT / 'configs' / f'{name}.py'
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(arg)


@pytest.fixture
def config():
  config = config_of('capsule', 'tiny')
  config.data.update(thickness=(1,), noise=(0.1, 0.9))
  return config


def test_runs_see_the_bags_of_their_own_point(config):
  part = capsule.make(config).parts['uniform']
  mine = capsule.point_of(config)
  np.testing.assert_array_equal(mine, [0, 0, 1, 1])
  n = config.data.train_bags
  for step in range(5):
    index = part.data.load(step, slice(0, part.data.batch_size))['index']
    assert (index // n == mine[:, None]).all()
  held = part.evaluations['test']
  size, seen = config.data.test_bags, []
  for step in range(held.steps):
    found = held.load(step, slice(0, held.batch_size))
    index, weight = found['index'], found['weight']
    assert (index // size == mine[:, None]).all()
    seen.append(np.where(weight > 0, index % size, -1))
  for row in np.concatenate(seen, 1):
    np.testing.assert_array_equal(row[row >= 0], np.arange(size))


def test_points_differ_in_noise_only(config):
  test = capsule.simulate(config, 'test')
  np.testing.assert_array_equal(test.kinds[0], test.kinds[1])
  mean = test.features.mean(0)
  assert np.isfinite(mean).all()
  spread = [(x - x.mean()).std() for x in test.features[..., 4]]
  np.testing.assert_allclose(spread, [0.1, 0.9], rtol=0.15)


def test_splits_share_no_bag(config):
  found = [capsule.simulate(config, s).features[0] for s in planted.SPLITS]
  a, b, c = (x[:, 0, 0] for x in found)
  assert not set(a) & set(b)
  assert not set(b) & set(c)


def test_all_points_share_one_width_and_readout(config):
  models = [
    planted.make_model(config, name, 2) for name in ('uniform', 'tmevolve')
  ]
  for field in ('hidden', 'regions', 'steps', 'pooling', 'num_concepts'):
    a, b = (getattr(model, field) for model in models)
    assert a == b
  assert planted.make_model(config, 'static', 2).smooth_iters == 0


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    ({'data.task': 'capsul'}, 'capsul'),
    ({'train.runs': 1}, 'runs=1'),
    ({'data.test_bags': 2}, 'test_bags=2'),
  ],
)
def test_bad_values_are_named(config, change, match):
  for key, value in change.items():
    level, leaf = key.split('.')
    config[level][leaf] = value
  with pytest.raises(ValueError, match=match):
    capsule.make(config)


def test_an_unknown_model_is_named(config):
  config.models = ('unifrom',)
  with pytest.raises(ValueError, match='unifrom'):
    capsule.make(config)


def test_tiny_leaves_its_report(tmp_path):
  config = config_of('capsule', 'tiny')
  assert train.run(capsule.make, config, workdir=tmp_path) == 0
  out = tmp_path / 'report'
  with (out / 'table.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['model'] for row in rows] == ['uniform', 'tmevolve']
  for row in rows:
    assert 0 <= float(row['low']) <= float(row['mean']) + 1e-9
    assert len(row['each_seed'].split()) == 2
  text = (out / 'table.md').read_text()
  assert 'One may conclude' in text
  with (out / 'regions.csv').open() as file:
    regions = list(csv.DictReader(file))
  assert [row['stage'] for row in regions] == ['start', 'end']
  assert all(0 < float(row['rho_inside']) <= 1 for row in regions)
  pictures = {path.name for path in out.glob('*.png')}
  assert pictures == {
    'curves.png', 'energy.png', 'tmevolve_fields.png', 'tmevolve_flux.png',
    'uniform_fields.png',
  }  # fmt: skip


@pytest.mark.slow
def test_gating_learns_what_plain_diffusion_does_not(capsys):
  config = config_of('capsule')
  config.data.update(thickness=(1,), noise=(0.4,), validation_bags=8)
  config.train.update(runs=2, log_every=250)
  area = {}
  for name in ('uniform', 'tmevolve'):
    splits = {s: capsule.simulate(config, s) for s in planted.SPLITS}
    config.models = (name,)
    part = capsule.make(config).parts[name]
    assert splits['test'].label.mean() == 0.5
    result = train.fit(
      part.build, part.data, steps=config.train.steps, runs=part.runs,
      evaluations={'test': part.evaluations['test']},
      summarize=part.summarize,
      options=train.Options.from_config(config.train), writers=(),
    )  # fmt: skip
    area[name] = [one.metrics['auroc'] for one in result.evaluations['test']]
  with capsys.disabled():
    print(f'\ncapsule, test AUC of two seeds: {area}')  # noqa: T201
  assert min(area['tmevolve']) > 0.8
  assert np.mean(area['tmevolve']) > np.mean(area['uniform'])
