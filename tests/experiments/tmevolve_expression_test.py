"""Expression of spots: folds, baselines, diffusion, regions, contact."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import tmevolve_expression as runner
from experiments import tmevolve_expression_report as report
from tmlib.data import planted_spots
from tmlib.ops.graph import ell_from_grid
from tmlib.ops.statistics import adjusted_rand_index

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def config():
  path = ROOT / 'configs' / 'tmevolve_expression.py'
  spec = importlib.util.spec_from_file_location('tmevolve_expression', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config('tiny')


def test_a_tested_section_has_no_part_in_its_fold():
  sections = planted_spots(3, seed=0)
  before = runner.make_folds(sections, 5)
  other = sections[1]._replace(
    counts=sections[1].counts[:, ::-1] ** 2,
    features=sections[1].features * 100,
  )
  after = runner.make_folds([sections[0], other, sections[2]], 5)
  assert before[1].genes == after[1].genes
  for i in (0, 2):
    np.testing.assert_array_equal(before[1].features[i], after[1].features[i])
    np.testing.assert_array_equal(before[1].targets[i], after[1].targets[i])
  assert before[0].genes != after[0].genes
  seen = np.concatenate([before[1].targets[i] for i in (0, 2)])
  np.testing.assert_allclose(seen.mean(0), 0, atol=1e-9)
  np.testing.assert_allclose(seen.std(0), 1, atol=1e-9)


def test_sections_are_joined_by_gene_names():
  sections = planted_spots(3, seed=0)
  turned = sections[2]._replace(
    genes=sections[2].genes[::-1], counts=sections[2].counts[:, ::-1]
  )
  want = runner.make_folds(sections, 5)
  found = runner.make_folds([*sections[:2], turned], 5)
  for a, b in zip(want, found, strict=True):
    assert a.genes == b.genes
    np.testing.assert_allclose(a.targets[2], b.targets[2])


def test_a_run_reads_the_tables_of_its_fold(config):
  study = runner.load_study(config)
  part = runner.make(config).parts['static']
  data = part.data
  load = data.load(0, slice(0, data.batch_size))
  for run in range(part.runs):
    used = load['index'][run][load['weight'][run] > 0]
    assert sorted(used) == [i for i in range(3) if i != run]
  batch = jax.tree.map(lambda x: x[2], load)
  found = data.gather(jax.tree.map(jnp.asarray, data.resident), batch)
  for row, i in enumerate(batch['index']):
    fold, size = study.folds[2], len(study.sections[i].grid)
    for name, want in (
      ('target', fold.targets[i]),
      ('features', fold.features[i]),
    ):
      table = found['bag'].features if name == 'features' else found[name]
      np.testing.assert_allclose(table[row, :size], want, rtol=1e-6)
    assert found['bag'].mask[row].sum() == size


def test_ridge_solves_its_normal_equations():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(20, 3)) + 1, rng.normal(size=(20, 2))
  fit = report.ridge(x, y, 0.7)
  error = x @ fit[:3] + fit[3] - y
  np.testing.assert_allclose(x.T @ error + 0.7 * fit[:3], 0, atol=1e-10)
  np.testing.assert_allclose(error.sum(0), 0, atol=1e-10)


def test_neighbours_and_diffusion_by_hand():
  # Three spots in a row and one alone; K = 8.
  graph = ell_from_grid(np.array([[0, 0], [0, 1], [0, 2], [5, 5]]))
  x = np.array([[0.0], [3.0], [9.0], [7.0]])
  np.testing.assert_allclose(
    report.neighbour_mean(x, graph), [[3], [4.5], [3], [7]]
  )
  np.testing.assert_allclose(
    report.diffuse(x, graph, 1), [[3 / 8], [3 + 3 / 8], [9 - 6 / 8], [7]]
  )
  np.testing.assert_allclose(report.diffuse(x, graph, 50).sum(), x.sum())


def test_ridge_with_neighbours_is_better_where_tissue_is_smooth(config):
  study = runner.load_study(config)
  found = {
    name: report._once(report.ridge_predictions(study, neighbours=on))
    for name, on in (
      ('ridge', False),
      ('ridge, with mean of neighbours', True),
    )
  }
  plain, wide = report._rows(config, study, found)
  assert wide['pearson'] > plain['pearson'] + 0.02
  assert plain['pearson'] > 0.5


def test_regions_read_no_label(config):
  section = planted_spots(1, seed=0)[0]
  components, table = runner.region_tables(config, section)
  hidden = runner.region_tables(config, section._replace(labels=None))
  np.testing.assert_array_equal(components, hidden[0])
  assert components.shape == (64, 4)
  assert table.shape == (64, 8)
  # Principal components: uncorrelated, by decreasing variance.
  covariance = np.cov(components.T)
  np.testing.assert_allclose(
    covariance, np.diag(np.diag(covariance)), atol=1e-9
  )
  assert (np.diff(np.diag(covariance)) <= 0).all()


def test_regions_are_led_by_the_concept_rows(config):
  # Simulated genes by the names of two signatures.
  study = runner.load_study(config)
  named = ('TRAC', 'CD7', 'DCN', 'LUM', 'FN1')
  sections = [
    one._replace(genes=(*named, *one.genes[5:])) for one in study.labelled
  ]
  study = study._replace(labelled=sections)
  assert runner.concept_controls(config, study) == config.regions.concepts
  for rows in ('given', 'shuffled'):
    part = runner._regions(config, study, rows)
    bag = part.data.resident['bag']
    assert bag.concepts.shape == (2, 64, 5)
    np.testing.assert_allclose(bag.concepts.mean(1), 0, atol=1e-6)
  plain = runner._regions(config, study)
  assert plain.data.resident['bag'].concepts is None
  network = runner.make_network(
    config, 'tmevolve', 8, concept_mode='similarity',
    concept_matrix=np.eye(5)[:2],
  )  # fmt: skip
  assert network.concept_mode == 'similarity'


def test_rand_index_is_that_of_a_peer():
  metrics = pytest.importorskip('sklearn.metrics')
  rng = np.random.default_rng(0)
  for size, kinds in ((2, 2), (30, 4), (200, 7)):
    a, b = rng.integers(0, kinds, (2, size))
    np.testing.assert_allclose(
      adjusted_rand_index(a, b), metrics.adjusted_rand_score(a, b), atol=1e-12
    )
  assert adjusted_rand_index(['x', 'y', 'x'], [3, 1, 3]) == 1
  assert adjusted_rand_index([0, 0], [1, 1]) == 1
  with pytest.raises(ValueError, match=r'must both be \[n\]'):
    adjusted_rand_index([0], [0, 1])


@pytest.mark.parametrize(
  ('field', 'value', 'error', 'match'),
  [
    ('data.synthetic', 0, ValueError, 'data.dir is empty.*:tiny'),
    ('data.synthetic', 2, ValueError, 'at least 3'),
    ('data.dir', '/no/such', FileNotFoundError, 'no folder.*her2st'),
    ('data.genes', 99, ValueError, '^data.genes'),
    ('regions.genes', 99, ValueError, '^regions.genes'),
    ('regions.components', 99, ValueError, '^regions.components|components=99'),
    ('train.runs', 0, ValueError, 'train.runs=0'),
    ('regions.concepts', ('x',), ValueError, r"^regions.concepts has \['x'\]"),
    ('models', ('abmil',), ValueError, "'abmil', which predicts no spots"),
  ],
)
def test_a_wrong_field_is_named(config, field, value, error, match):
  config.update_from_flattened_dict({field: value})
  with pytest.raises(error, match=match):
    runner.make(config)
