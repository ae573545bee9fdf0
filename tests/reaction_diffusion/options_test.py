"""Every bad option is refused before anything compiles, with its fix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reaction_diffusion import support
from tmlib import reaction_diffusion as rd
from tmlib.mil import Bag


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (dict(tau=1.5), r'tau=1.5 exceeds stability bound 1/1=1; use '),
    (
      dict(tau=0.9, reaction='relax', lam=0.5),
      r"1/\(1\+lam\)=0.6667; use integrator='semi_implicit' or lower tau",
    ),
    (dict(tau=0.6, reaction='allen_cahn'), r'1/\(1\+2\*lam\)=0.5'),
    (dict(tau=0.6, flux='upwind'), r'1/2=0.5'),
    (dict(tau=0.0), 'must be positive'),
    (dict(tau=float('nan')), 'must be positive'),
    (dict(tau='big'), "tau='big' is unknown; allowed: learned, cfl"),
    (dict(steps=-1), 'steps=-1 must be an integer >= 0'),
    (dict(steps=1.5), 'steps=1.5'),
    (dict(lam=1.0), r'lam=1.0 must lie in \[0, 1\)'),
    (dict(lam=-0.1), 'lam=-0.1'),
    (dict(cfl=1.1), 'cfl=1.1'),
    (dict(cfl=1.0), "cfl=1 with tau='learned' has no start"),
    (dict(tau=2 / 3, reaction='relax', lam=0.5), 'lam=0.5 leaves no room'),
    (dict(omega=0.0), 'omega=0.0'),
    (dict(regions=0), 'regions=0 must be an integer >= 1'),
    (dict(num_concepts=0), 'num_concepts=0'),
    (dict(dropout=1.0), 'dropout=1.0'),
    (dict(temperature=0.0), 'temperature=0.0'),
    (dict(degree=0), 'degree=0'),
    (dict(reaction='heat'), 'allowed: none, relax, fisher, zeldovich, allen'),
    (dict(integrator='leapfrog'), 'allowed: euler, heun, rk4, semi_implicit'),
    (dict(concept_mode='text'), 'allowed: similarity, projected, learned'),
    (dict(activation='relu'), 'allowed: softmax, sigmoid'),
    (dict(flux='up'), 'allowed: symmetric, upwind'),
    (dict(same_region='dot'), 'allowed: inner, bhattacharyya'),
    (dict(reassign='never'), 'allowed: once, every_step'),
    (dict(pooling='max'), 'allowed: region, patch'),
    (dict(task='segment'), 'allowed: classify, survival, expression'),
    (dict(flux='upwind', integrator='imex_cg'), 'needs a symmetric operator'),
    (dict(flux='upwind', concept_mode='none'), 'direction from concepts'),
    (dict(concept_mode='similarity'), r'needs concept_matrix \[M, Q\]'),
    (dict(concept_matrix=np.eye(3)), 'does not read concept_matrix'),
    (
      dict(concept_mode='projected', concept_matrix=np.zeros((0, 3))),
      'M=0 concepts',
    ),
    (
      dict(concept_mode='projected', concept_matrix=np.full((2, 3), np.nan)),
      r'rows \[0, 1\]',
    ),
  ],
)
def test_refused(options, message):
  with pytest.raises(ValueError, match=message):
    rd.TMEvolve(**options)


@pytest.mark.parametrize(
  'options',
  [
    dict(tau=1.0),
    dict(tau='cfl', cfl=1.0),
    dict(tau=0.66, reaction='relax', lam=0.5),
    dict(tau=100.0, integrator='semi_implicit', reaction='relax'),
    dict(tau=100.0, integrator='imex_cg', reaction='allen_cahn'),
    dict(steps=0, smooth_iters=0, refine_iters=0),
    dict(lam=0.0, reaction='fisher', tau=1.0),
  ],
)
def test_accepted(options):
  rd.TMEvolve(**options)


def test_rows_of_concepts_are_normalised_with_a_warning():
  with pytest.warns(UserWarning, match='normalising'):
    model = rd.TMEvolve(concept_mode='projected', concept_matrix=2 * np.eye(3))
  np.testing.assert_allclose(model.concept_matrix, np.eye(3))
  assert hash(model) == hash(model.clone())


@pytest.mark.parametrize('value', [1e-5, 0.2, 0.9997])
def test_rate_and_share_start_where_they_were_asked_to(value):
  _, graph = support.grid_graph(np.random.default_rng(0), 3, 3, 5)
  bag = Bag(np.ones((5, 2), np.float32), np.ones(5, bool), graph)
  model = rd.TMEvolve(hidden=4, steps=1, reaction='relax', lam=value, cfl=value)
  _, p = jax.jit(model.init_with_output)(jax.random.key(0), bag)
  seen = jax.jit(lambda p: model.apply(p, bag, trace=True).extras)(p)
  assert seen['lam'] == pytest.approx(value, rel=1e-4)
  assert seen['tau'] == pytest.approx(value / (1 + value), rel=1e-4)


def test_graph_wider_than_the_normaliser():
  _, graph = support.grid_graph(np.random.default_rng(0), 3, 3, 5)
  bag = Bag(jnp.zeros((5, 2)), np.ones(5, bool), graph)
  model = rd.TMEvolve(hidden=4, degree=3)
  with pytest.raises(ValueError, match='K=4 slots but degree=3'):
    jax.eval_shape(model.init, jax.random.key(0), bag)


def test_features_of_another_encoder():
  _, graph = support.grid_graph(np.random.default_rng(0), 3, 3, 5)
  bag = Bag(jnp.zeros((5, 2)), np.ones(5, bool), graph)
  model = rd.TMEvolve(hidden=4, steps=1)
  p = jax.eval_shape(model.init, jax.random.key(0), bag)
  wrong = bag.replace(features=jnp.zeros((5, 3)))
  with pytest.raises(ValueError, match='dim 3 but the model was built for 2'):
    jax.eval_shape(model.apply, p, wrong)


def test_evolve_checks_its_numbers():
  with pytest.raises(ValueError, match='steps=-1'):
    rd.evolve(None, None, None, 0.1, -1)
  _, graph = support.grid_graph(np.random.default_rng(0), 3, 3, 5)
  half = np.full(2, 0.5, np.float32)
  c = rd.Coefficients(graph.emask / np.float32(4), None, half, half)
  fields = rd.Fields(jnp.ones((5, 2)), jnp.ones((5, 1)))
  with pytest.raises(ValueError, match='tau=1.5 exceeds stability bound'):
    rd.evolve(fields, c, graph, 1.5, 1)
  c = c.replace(lam=0.5, reaction='fisher')
  with pytest.raises(ValueError, match=r'1/\(1\+lam\)=0.6667'):
    rd.evolve(fields, c, graph, 0.7, 1)
  # A function of the fields, and steps that are arrays.
  for tau in (0.7, np.float32(0.7), jnp.asarray(0.7)):
    with pytest.raises(ValueError, match=r'1/\(1\+lam\)=0.6667'):
      rd.evolve(fields, lambda _: c, graph, tau, 1)
  moving = c.replace(velocity=c.intra, reaction='none')
  with pytest.raises(ValueError, match='1/2=0.5'):
    rd.evolve(fields, lambda _: moving, graph, 0.7, 1)
  rd.evolve(fields, lambda _: c, graph, 0.6, 1)


def test_only_bags_with_neighbour_tables_are_taken():
  model = rd.TMEvolve(2, hidden=4)
  init = lambda bag: jax.eval_shape(model.init, jax.random.key(0), bag)
  with pytest.raises(TypeError, match=r'bag must be a Bag, got .* \(13, 6\)'):
    init(np.ones((13, 6)))
  edges = np.array([[0, 1], [1, 0]])
  with pytest.raises(TypeError, match='graph of bag must be a PatchGraph'):
    init(Bag(np.ones((13, 6)), np.ones(13, bool), edges))
