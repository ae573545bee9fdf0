"""Survival and expression as methods; expression metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from scipy import stats

from tmlib import train
from tmlib.mil import (
  Bag,
  MILOutput,
  batch_bags,
  create_model,
  expression_summary,
  log_normalize,
  make_bag,
  pearson_per_gene,
  pearson_per_sample,
  regression_method,
  spearman_per_gene,
  spot_regression_method,
  variable_genes,
)
from tmlib.mil.survival import cox_method, discrete_survival_method

TIME = np.array([5, 3, 3, 8, 1, 9, 4, 2], np.float32)
EVENT = np.array([1, 1, 1, 0, 1, 0, 0, 1], np.float32)


def batch_of(seed=0, n=8, extra=None):
  rng = np.random.default_rng(seed)
  bags = [make_bag(rng.normal(size=(2 + i % 3, 4))) for i in range(n)]
  batch = {
    'bag': batch_bags(bags, 8), 'id': np.arange(n, dtype=np.int32),
    'weight': np.ones(n, np.float32), 'time': TIME[:n], 'event': EVENT[:n],
  }  # fmt: skip
  return batch | (extra or {})


def network(outputs):
  return create_model(
    'mean_pool', in_dim=4, num_classes=outputs, hidden=6, dropout=0.0
  )


def started(build, batch):
  method = build(None)
  state = method.init(jax.random.key(0), batch)
  return method, state


def brute_cox(risk, time, event):
  """Efron's partial likelihood by its definition, in float64."""
  total = 0.0
  for t in np.unique(time[event > 0]):
    tied = (time == t) & (event > 0)
    at_risk = np.exp(risk[time >= t]).sum()
    own, count = np.exp(risk[tied]).sum(), tied.sum()
    total -= risk[tied].sum()
    total += sum(np.log(at_risk - k / count * own) for k in range(count))
  return total / event.sum()


def test_cox_is_the_partial_likelihood_of_the_whole_batch():
  batch = batch_of()
  method, state = started(cox_method(network(1), optax.sgd(0.0)), batch)
  _, metrics = jax.jit(method.update)(state, batch)
  risk = method.evaluate(state, batch)['outputs']['risk']
  want = brute_cox(np.asarray(risk, np.float64), TIME, EVENT)
  assert abs(metrics['loss'] - want) < 1e-5
  assert metrics['events'] == 5


def test_padding_is_in_no_risk_set():
  batch = batch_of()
  method, state = started(cox_method(network(1), optax.sgd(0.0)), batch)
  part = {**batch, 'weight': np.float32([1, 1, 1, 1, 1, 0, 0, 0])}
  _, metrics = jax.jit(method.update)(state, part)
  risk = method.evaluate(state, batch)['outputs']['risk'][:5]
  want = brute_cox(np.asarray(risk, np.float64), TIME[:5], EVENT[:5])
  assert abs(metrics['loss'] - want) < 1e-5
  assert metrics['events'] == 4


def test_a_batch_without_an_event_takes_no_step():
  batch = batch_of()
  method, state = started(cox_method(network(1), optax.sgd(1.0)), batch)
  quiet = {**batch, 'event': np.zeros(8, np.float32)}
  after, metrics = jax.jit(method.update)(state, quiet)
  assert metrics['loss'] == 0
  assert metrics['events'] == 0
  assert metrics['grad_norm'] == 0
  jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


def test_cox_refuses_microbatches():
  with pytest.raises(ValueError, match='microbatches=2'):
    cox_method(network(1), optax.sgd(0.1), microbatches=2)(None)


class Parts(nn.Module):
  """The sum of a bag as its risk, and two parts of it; some bags have one."""

  @nn.compact
  def __call__(self, bag, train=False, dropout_keys=None):
    del train, dropout_keys
    scale = self.param('scale', nn.initializers.constant(0.7), ())
    features = jnp.where(bag.mask[..., None], bag.features, 0) * scale
    risk = features.sum((1, 2))[:, None]
    parts = features[:, :, :2].sum(1)[..., None]
    second = (jnp.sum(bag.mask, 1) > 2).astype(jnp.float32)
    share = jnp.stack([1 - second / 2, second / 2], 1)
    return MILOutput(
      risk, features[..., 0], risk, {}, {}, {'t': (parts, share)}
    )


def test_cox_of_parts_compares_them_among_themselves():
  batch = batch_of()
  build = cox_method(Parts(), optax.sgd(0.0), aux_weights={'t': 0.5})
  method, state = started(build, batch)
  _, metrics = jax.jit(method.update)(state, batch)
  bag = batch['bag']
  x = 0.7 * np.where(bag.mask[..., None], bag.features, 0).astype(np.float64)
  some = bag.mask.sum(1) > 2
  first = brute_cox(x[..., 0].sum(1), TIME, EVENT)
  second = brute_cox(x[some, :, 1].sum(1), TIME[some], EVENT[some])
  want = brute_cox(x.sum((1, 2)), TIME, EVENT) + 0.5 * (first + second) / 2
  assert 0 < EVENT[some].sum() < EVENT.sum()
  assert abs(metrics['loss'] - want) < 1e-5
  assert abs(metrics['aux/t'] - (first + second) / 2) < 1e-5
  assert metrics['grad_norm'] > 1e-3


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_cox_spans_all_devices(parallel):
  """Four devices with two patients each: loss and gradient as on one."""
  batch, rows = batch_of(), []
  build = cox_method(network(1), optax.sgd(0.0))

  class Writer:
    def write(self, step, row):
      rows.append(row)

    def close(self):
      pass

  fitted = train.fit(
    build,
    train.array_data(batch, 8, shuffle=False),
    steps=1,
    options=train.Options(parallel=parallel, log_every=1),
    writers=[Writer()],
  )
  method, state = started(build, batch)
  state = state.replace(params=jax.device_get(fitted.state.params))
  _, want = jax.jit(method.update)(state, batch)
  risk = method.evaluate(state, batch)['outputs']['risk']
  brute = brute_cox(np.asarray(risk, np.float64), TIME, EVENT)
  assert abs(rows[0]['loss'] - brute) < 1e-5
  assert abs(rows[0]['grad_norm'] - want['grad_norm']) < 1e-5
  assert want['grad_norm'] > 0.01
  assert rows[0]['events'] == 5


def test_discrete_survival_by_hand():
  bins = np.array([1, 0, 0, 2, 0, 2, 1, 0], np.int32)
  batch = batch_of(extra={'bin': bins})
  build = discrete_survival_method(network(3), optax.sgd(0.0), alpha=0.25)
  method, state = started(build, batch)
  _, metrics = jax.jit(method.update)(state, batch)
  found = method.evaluate(state, batch)['outputs']
  hazard = 1 / (1 + np.exp(-np.asarray(found['logits'], np.float64)))
  alive = np.cumprod(1 - hazard, 1)
  before = np.concatenate([np.ones((8, 1)), alive], 1)
  row = np.arange(8)
  dead = -np.log(before[row, bins]) - np.log(hazard[row, bins])
  censored = -0.75 * np.log(alive[row, bins])
  want = np.where(EVENT > 0, dead, censored).mean()
  assert abs(metrics['loss'] - want) < 1e-5
  np.testing.assert_allclose(found['risk'], -alive.sum(1), rtol=1e-5)


def test_regression_learns_on_its_own_scale():
  target = np.random.default_rng(1).normal(size=(8, 3)) * [1, 10, 0] + 5
  batch = batch_of(extra={'target': target.astype(np.float32)})
  scale = np.where(target.std(0) > 0, target.std(0), 1)
  build = regression_method(
    network(3), optax.sgd(0.0), center=target.mean(0), scale=scale
  )
  method, state = started(build, batch)
  _, metrics = jax.jit(method.update)(state, batch)
  found = method.evaluate(state, batch)['outputs']
  gap = (np.asarray(found['prediction']) - target) / scale
  np.testing.assert_allclose(metrics['loss'], (gap**2).mean(), rtol=1e-5)
  with pytest.raises(ValueError, match='positive'):
    regression_method(network(3), optax.sgd(0.0), center=0, scale=[1, 0, 1])


def test_correlations_are_those_of_scipy():
  rng = np.random.default_rng(0)
  y, x = rng.normal(size=(2, 20, 6))
  y[:, 3] = np.round(y[:, 3])
  x[:, 5] = 2.5
  pearson, spearman = pearson_per_gene(y, x), spearman_per_gene(y, x)
  for g in range(5):
    assert abs(pearson[g] - stats.pearsonr(y[:, g], x[:, g])[0]) < 1e-12
    assert abs(spearman[g] - stats.spearmanr(y[:, g], x[:, g])[0]) < 1e-12
  assert np.isnan(pearson[5])
  assert np.isnan(spearman[5])
  rows = pearson_per_sample(y, x)
  want = [stats.pearsonr(a, b)[0] for a, b in zip(y, x, strict=True)]
  np.testing.assert_allclose(rows, want, atol=1e-12)


def test_a_constant_gene_is_counted_and_never_zero():
  y = np.array([[0.0, 1, 3], [1, 1, 2], [2, 1, 1]])
  x = np.array([[0.0, 5, 1], [1, 6, 2], [2, 7, 3]])
  found = expression_summary(y, x, top=1)
  assert found['constant_genes'] == 1
  assert abs(found['pearson'] - 0) < 1e-12  # of +1 and -1
  assert abs(found['pearson_top'] - 1) < 1e-12
  # 1 for the first gene; 1 - 8 / 2 for the last.
  assert abs(found['r2'] - (1 - 3) / 2) < 1e-12
  assert abs(found['mse'] - (16 + 25 + 36 + 4 + 0 + 4) / 9) < 1e-12
  with pytest.raises(ValueError, match='must be finite'):
    pearson_per_gene(y * np.nan, x)


def test_normalisation():
  counts = np.array([[1, 3], [0, 0], [5, 5]])
  got = log_normalize(counts, 100)
  np.testing.assert_allclose(got, np.log1p([[25, 75], [0, 0], [50, 50]]))
  assert variable_genes([[0, 1, 0], [0, -1, 9]], 2).tolist() == [2, 1]
  with pytest.raises(ValueError, match='normalised already'):
    log_normalize([[-1.0]])
  with pytest.raises(ValueError, match=r'count=4 must be in \[1, 3\]'):
    variable_genes(np.zeros((2, 3)), 4)


class TestSpots:
  @staticmethod
  def batch(junk=0.0):
    rng = np.random.default_rng(0)
    mask = np.arange(6) < np.array([[6], [4], [5]])
    features = np.where(mask[..., None], rng.normal(size=(3, 6, 2)), junk)
    target = np.where(mask[..., None], rng.normal(size=(3, 6, 2)), junk)
    return {
      'bag': Bag(features.astype(np.float32), mask),
      'target': target.astype(np.float32),
      'weight': np.array([1, 1, 0], np.float32),
      'id': np.arange(3, dtype=np.int32),
    }

  def test_the_loss_is_that_of_real_spots_whatever_padding_holds(self):
    class Echo(nn.Module):
      @nn.compact
      def __call__(self, bag, train=False, dropout_keys=None):
        scale = self.param('scale', nn.initializers.constant(2.0), ())
        pooled = jnp.zeros((len(bag.mask), 1))
        # As every model of bags: nothing is made of padded rows.
        seen = jnp.where(bag.mask[..., None], bag.features, 0)
        extras = {'node_outputs': scale * seen}
        return MILOutput(pooled, pooled, pooled, extras=extras)

    method = spot_regression_method(Echo(), optax.sgd(0.1))(None)
    for junk in (0.0, np.nan):
      batch = self.batch(junk)
      state = method.init(jax.random.key(0), batch)
      found = method.evaluate(state, batch)
      real = batch['bag'].mask & (np.arange(3) < 2)[:, None]
      error = 2 * batch['bag'].features - batch['target']
      total, count = found['sums']['loss']
      np.testing.assert_allclose(total, (error[real] ** 2).mean(-1).sum(), 1e-5)
      assert count == 10
      state, metrics = method.update(state, batch)
      want = (error[real] ** 2).mean()
      np.testing.assert_allclose(metrics['loss'], want, rtol=1e-5)
      assert np.isfinite(state.params['scale'])

  def test_a_model_of_bags_is_refused(self):
    method = spot_regression_method(
      create_model('mean_pool', num_classes=2, hidden=4), optax.sgd(0.1)
    )(None)
    with pytest.raises(ValueError, match='predicts bags only'):
      method.init(jax.random.key(0), self.batch())
