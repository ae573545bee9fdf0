"""The curve over noise and thickness: data per run, reports, learning."""

import csv
import dataclasses
import importlib.util
import itertools
import pathlib

import jax
import numpy as np
import pytest

from experiments import capsule, planted
from tmlib import train
from tmlib.reaction_diffusion import TMEvolve

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
  config.models = ('uniform', 'tmevolve')
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


def noise_of(config, split):
  """What is left of the features [L, n N, P] without the mean of each kind."""
  found = capsule.simulate(config, split)
  means = np.diag([1.0, 1, 1, config.data.contrast, 1])
  return (found.features - means[found.kinds]).reshape(
    len(found.features), -1, config.data.dim
  )


def test_features_are_the_kind_and_noise_of_the_given_level(config):
  for split in planted.SPLITS:
    for level, noise in zip((0.1, 0.9), noise_of(config, split), strict=True):
      count = len(noise)
      assert abs(noise.mean(0)).max() < 4 * level / np.sqrt(count)
      np.testing.assert_allclose(noise.std(0), level, rtol=4 / np.sqrt(count))


def test_every_point_and_split_has_its_own_tissue_and_noise(config):
  config.data.update(noise=(0.1, 0.9), test_bags=16, validation_bags=16)
  unit, layout = [], []
  for split in planted.SPLITS:
    found = capsule.simulate(config, split)
    layout += list(found.kinds.reshape(2, -1))
    unit += [x.ravel() / x.std() for x in noise_of(config, split)]
  for i, j in itertools.combinations(range(len(unit)), 2):
    assert abs(np.mean(unit[i] * unit[j])) < 5 / np.sqrt(unit[i].size)
    assert np.mean(layout[i] == layout[j]) < 0.9
  # A point is the same whatever other points there are.
  both = capsule.simulate(config, 'test')
  config.data.noise = (0.9,)
  alone = capsule.simulate(config, 'test')
  np.testing.assert_array_equal(alone.features[0], both.features[1])


def test_models_differ_in_what_their_names_say_and_in_nothing_else():
  config = config_of('capsule', 'full')
  fields = [f.name for f in dataclasses.fields(TMEvolve)]
  ours = planted.make_model(config, 'tmevolve', 2)
  for name, changes in {
    'uniform': {'uniform'},
    'uniform_relax': {'uniform', 'reaction'},
    'static': {'steps'},
    'no_flux': {'boundary_flux'},
    'no_concept_flux': {'concept_flux'},
  }.items():
    model = planted.make_model(config, name, 2)
    differ = {f for f in fields if getattr(model, f) != getattr(ours, f)}
    assert differ == changes, name
  config = config_of('capsule', 'tiny')
  config.models = ('uniform',)
  part = capsule.make(config).parts['uniform']
  batch = jax.tree.map(
    lambda x: x[0], part.data.load(0, slice(0, part.data.batch_size))
  )
  bag = part.data.gather(part.data.resident, batch)['bag']
  widths = {}
  for name in (*config_of('capsule', 'full').models,):
    model = planted.make_model(config, name, 2)
    shapes = jax.eval_shape(model.init, jax.random.key(0), bag)
    widths[name] = {
      leaf.shape for leaf in jax.tree.leaves(shapes) if 5 in leaf.shape
    }
  # What meets the five features is as wide in every model, ABMIL included.
  for name, shapes in widths.items():
    concepts = 0 if name == 'gated_abmil' else 4
    assert shapes == {(5, 8 + concepts)}, name


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


def test_a_small_run_leaves_its_report(tmp_path):
  config = config_of('capsule', 'tiny')
  config.models = ('uniform', 'tmevolve')
  assert train.run(capsule.make, config, workdir=tmp_path) == 0
  out = tmp_path / 'report'
  with (out / 'table.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['model'] for row in rows] == ['uniform', 'tmevolve']
  assert 'difference' in rows[1]
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
