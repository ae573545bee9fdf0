"""One contract, held by every registered method.

A family adds a line to CASES: a function that returns a `Case` of its method,
small enough to compile in about a second.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tmlib import train


class Case(NamedTuple):
  """A method and what is needed to run it.

  Attributes:
    build: axis name or None -> Method.
    data: an endless stream of batches of eight examples, or None.
    passed: a finite pass, or None where there is nothing to evaluate.
    pad: batch -> the same batch with other contents in its padding; None where
      examples have no padding of their own.
    layout_dependent: per-device mode gives other numbers, by its nature.
    atol: how far layouts may differ.
    aot: compile for a TPU slice.
  """

  build: Callable[..., train.Method]
  data: train.Data | None = None
  passed: train.Data | None = None
  pad: Callable[[Any], Any] | None = None
  layout_dependent: bool = False
  atol: float = 1e-6
  aot: bool = True


def linear():
  def loss(params, batch, key, step):
    del key, step
    error = (batch['x'] @ params['w'] - batch['y']) ** 2
    real = batch['weight'] > 0
    total = jnp.sum(jnp.where(real, error, 0) * batch['weight'])
    return total, batch['weight'].sum(), {}

  def evaluate(params, batch):
    outputs = {'prediction': batch['x'] @ params['w'], 'id': batch['id']}
    return {'sums': {}, 'outputs': outputs}

  build = train.gradient_method(
    lambda key, batch: {'w': jax.random.normal(key, batch['x'].shape[-1:])},
    loss, evaluate, optax.sgd(0.1),
  )  # fmt: skip
  return Case(build, toy.data(), toy.held_out())


def noisy():
  return Case(toy.build(ema_decay=0.9), toy.data(), toy.held_out())


def bandit():
  return Case(toy.bandit)


def bags(n=24, p=6, size=5):
  """Strips of one to five patches, label by the mean of the first feature."""
  from tmlib.mil import batch_bags, make_bag
  from tmlib.reaction_diffusion import ell_from_grid

  rng = np.random.default_rng(0)
  found = []
  for count in rng.integers(1, size + 1, n):
    x = rng.normal(size=(count, p)).astype(np.float32)
    strip = np.stack([np.zeros(count, int), np.arange(count)], 1)
    found.append(make_bag(x, graph=ell_from_grid(strip, connectivity=4)))
  batch = batch_bags(found, size)
  label = np.array([x.features[:, 0].mean() > 0 for x in found], np.int32)
  return {'bag': jax.tree.map(np.asarray, batch), 'label': label}


def poison_bags(batch):
  bag = batch['bag']
  features = jnp.where(bag.mask[..., None], bag.features, jnp.nan)
  return batch | {'bag': bag.replace(features=features)}


def bag_case(model):
  from tmlib.mil import classification_method

  build = classification_method(model, optax.sgd(1e-2), num_classes=2)
  arrays = bags()
  return Case(
    build, train.array_data(arrays, 8), train.pass_data(arrays, 8), poison_bags
  )


def abmil():
  from tmlib.mil import ABMIL

  return bag_case(ABMIL(num_classes=2, hidden=8, attention=4))


def tmevolve():
  from tmlib.reaction_diffusion import TMEvolve

  model = TMEvolve(2, hidden=4, regions=2, num_concepts=2, steps=1, dropout=0.1)
  return bag_case(model)


def duels():
  from tmlib import dueling

  env = dueling.hard_instance(jax.random.key(0), 4, 2, 0.2, groups=2)
  return Case(dueling.bandit_method(env, 'eps_greedy', 64, 8))


def crowd():
  from tmlib.mean_field import envs, solver_method

  game = envs.crowd_1d(3, 2, [0.8, 0.1, 0.1])
  return Case(solver_method(game, 'fictitious_play', lr=None))


def spins():
  from tmlib.mean_field import ising_env, mf_q_method

  return Case(mf_q_method(ising_env(4, 4), np.linspace(1, 2, 4)))


def shop():
  from tmlib import market

  game = market.ProviderGame(budgets=(4.0, 2.0), tau=0.2)
  return Case(market.market_method(game, 8, users=16))


def poison_windows(batch):
  pad = batch['item'] == 0
  moved = {k: jnp.where(pad, 77, batch[k]) for k in ('time', 'now')}
  return batch | moved


def sasrec():
  from tests.recsys import support
  from tmlib.recsys.method import sasrec_method

  learn, ask = support.arrays()
  build = sasrec_method(
    30, optax.sgd(0.1), dim=8, heads=2, hidden=8, blocks=1, dropout=0.0
  )
  return Case(
    build, train.array_data(learn, 8), train.pass_data(ask, 8), poison_windows
  )


MAKERS = (
  linear, noisy, bandit, duels, crowd, shop, spins, abmil, tmevolve, sasrec,
)  # fmt: skip
CASES = {f.__name__: functools.cache(f) for f in MAKERS}
# Their checks that compile once more than the others are slow tests.
HEAVY = ('abmil', 'tmevolve', 'duels', 'crowd', 'shop', 'spins', 'sasrec')
NAMES = [
  pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name
  for name in sorted(CASES)
]


@pytest.fixture(params=sorted(CASES))
def case(request):
  """Every method."""
  return CASES[request.param]()


@pytest.fixture(params=NAMES)
def light_case(request):
  """Every method, the heavy ones where slow tests are asked for."""
  return CASES[request.param]()


class Started(NamedTuple):
  """A method's compiled functions, a fresh state and one batch."""

  method: train.Method
  init: Callable[..., Any]
  update: Callable[..., Any]
  state: Any
  batch: Any


_STARTED: dict[Any, Started] = {}


def first_batch(data):
  batch = data.load(0, slice(0, data.batch_size))
  return jax.tree.map(jnp.asarray, data.gather(data.resident, batch))


def start(case):
  if case.build not in _STARTED:
    method, data = case.build(None), case.data
    batch = None if data is None else first_batch(data)
    init, update = jax.jit(method.init), jax.jit(method.update)
    state = init(jax.random.key(0), batch)
    _STARTED[case.build] = Started(method, init, update, state, batch)
  return _STARTED[case.build]


def finite(tree):
  for name, x in toy.flat(tree).items():
    if np.issubdtype(x.dtype, np.floating):
      assert np.isfinite(x).all(), name


def test_shapes_are_stable_and_values_finite(case):
  _, _, update, state, batch = start(case)
  describe = lambda t: jax.tree.map(lambda x: (x.shape, str(x.dtype)), t)
  before = describe(state)
  for _ in range(3):
    state, metrics = update(state, batch)
    assert describe(state) == before
  finite(state)
  finite(metrics)
  for value in metrics.values():
    for x in value if isinstance(value, tuple) else (value,):
      assert jnp.shape(x) == ()


def test_jit_equals_no_jit(light_case):
  case = light_case
  method, _, update, state, batch = start(case)
  new, metrics = update(state, batch)
  plain, plain_metrics = method.update(state, batch)
  toy.assert_close(new, plain, case.atol)
  toy.assert_close(metrics, jax.tree.map(jnp.asarray, plain_metrics), case.atol)


def test_a_fresh_state_can_be_donated(light_case):
  case = light_case
  method, init, _, _, batch = start(case)
  state = init(jax.random.key(1), batch)
  jax.jit(method.update, donate_argnums=0)(state, batch)
  assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_vmap_over_keys_equals_a_loop(light_case):
  case = light_case
  method, init, update, _, batch = start(case)
  keys = jax.random.split(jax.random.key(2), 3)
  many = jax.vmap(lambda key: method.update(method.init(key, batch), batch))
  together = jax.jit(many)(keys)
  for i in (0, 2):
    one = update(init(keys[i], batch), batch)
    toy.assert_close(toy.pick(together, i), one, case.atol)


def repad(case, batch):
  """The batch with padded examples, twice, with other contents in them."""
  weight = batch['weight'].at[5:].set(0)
  batch = batch | {'weight': weight}
  # Padded examples may hold anything finite; padding inside one, even NaN.
  other = jax.tree.map(lambda x: x.at[5:].set(x[:3][::-1]), batch)
  other = other | {'weight': weight}
  return batch, other if case.pad is None else case.pad(other)


def test_padding_never_changes_a_valid_output(case):
  method, _, update, state, batch = start(case)
  if case.passed is None:
    pytest.skip('nothing to pad')
  one, two = (update(state, b) for b in repad(case, batch))
  toy.assert_close(one, two, case.atol)
  evaluate = jax.jit(method.evaluate)
  pair = repad(case, first_batch(case.passed))
  a, b = (evaluate(state, batch) for batch in pair)
  toy.assert_close(a['sums'], b['sums'], case.atol)
  for name in a['outputs']:
    np.testing.assert_allclose(
      a['outputs'][name][:5], b['outputs'][name][:5], atol=case.atol
    )


def fit(case, steps=6, workdir=None, build=None, **options):
  evaluations = {} if case.passed is None else {'passed': case.passed}
  return train.fit(
    build or case.build, case.data, steps=steps, workdir=workdir,
    evaluations=evaluations, writers=[],
    options=train.Options(log_every=3, **options),
  )  # fmt: skip


def test_resume_is_bitwise_and_one_trace_is_enough(case, tmp_path):
  counts = {}
  whole = fit(case, build=toy.counting(case.build, counts))
  assert set(counts.values()) == {1}
  fit(case, 3, tmp_path)
  resumed = fit(case, 6, tmp_path)
  toy.assert_same(resumed.state, whole.state)
  for name, (found,) in whole.evaluations.items():
    toy.assert_same(resumed.evaluations[name][0].outputs, found.outputs)
    finite(found.outputs)


def test_per_device_mode_equals_jit(case):
  if case.layout_dependent:
    pytest.skip('by its nature')
  a, b = fit(case), fit(case, parallel='pmap')
  toy.assert_close(a.state, b.state, case.atol)
  for name, (found,) in a.evaluations.items():
    toy.assert_close(
      found.outputs, b.evaluations[name][0].outputs, 2 * case.atol
    )


def compiles(case, parallel):
  if importlib.util.find_spec('libtpu') is None or not case.aot:
    pytest.skip('libtpu is not installed')
  from tmlib.train import aot

  options = train.Options(parallel=parallel)
  reports = aot.compile_for(case.build, case.data, 'v5e:2x2', options=options)
  assert all(report.chips == 4 for report in reports.values())


@pytest.mark.aot
def test_it_compiles_for_a_tpu_slice(case):
  compiles(case, 'jit')


@pytest.mark.aot
def test_it_compiles_per_device_for_a_tpu_slice(light_case):
  compiles(light_case, 'pmap')
