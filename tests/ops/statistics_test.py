import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import mutual_info_score, roc_auc_score

from tmlib.ops.statistics import (
  UndefinedMetricWarning,
  bootstrap_difference,
  bootstrap_interval,
  delong_covariance,
  delong_difference,
  detectable_difference,
  midranks,
)


def _auc(labels, scores):
  """Mann-Whitney statistic from SciPy's ranks."""
  ranks, p = stats.rankdata(scores), np.sum(labels == 1)
  return (ranks[labels == 1].sum() - p * (p + 1) / 2) / (p * (len(labels) - p))


def _two_models(rng, n=80, shift=1.0):
  labels = rng.permutation(np.arange(n) % 2)
  shared = rng.normal(size=n)
  make = lambda s: s * labels + shared + 0.7 * rng.normal(size=n)
  return labels, make(shift), make(shift)


def test_midranks_equal_scipy():
  x = np.random.default_rng(0).integers(0, 9, 200)
  np.testing.assert_array_equal(midranks(x), stats.rankdata(x))


@pytest.mark.parametrize('method', ['percentile', 'basic', 'bca'])
def test_interval_of_a_mean_equals_scipy(method):
  x = np.random.default_rng(1).exponential(size=60)
  ours = bootstrap_interval(np.mean, x, method=method, samples=4000)
  name = 'BCa' if method == 'bca' else method
  theirs = stats.bootstrap(
    (x,), np.mean, method=name, n_resamples=4000, rng=0
  ).confidence_interval
  # Two independent resamplings: their quantiles differ by about 2 %.
  width = theirs.high - theirs.low
  assert abs(ours.low - theirs.low) < 0.08 * width
  assert abs(ours.high - theirs.high) < 0.08 * width
  assert ours.value == np.mean(x)
  assert ours.method == method


def test_bca_differs_from_percentile_on_a_skewed_statistic():
  x = np.random.default_rng(1).exponential(size=30)
  low = {
    m: bootstrap_interval(np.var, x, method=m).high
    for m in ('percentile', 'bca')
  }
  assert low['bca'] > low['percentile']


def test_basic_interval_undoes_the_bias_of_repeated_rows():
  # Independent labels: their plug-in mutual information is biased upwards, and
  # again upwards in every resample.
  rng = np.random.default_rng(0)
  x, y = rng.integers(0, 8, (2, 200))
  low, high = (
    bootstrap_interval(mutual_info_score, x, y, method=m, samples=300)
    for m in ('basic', 'percentile')
  )
  assert high.low > high.value
  assert low.low < low.value < high.low
  # Without the bias it is nearer to the truth, which is none.
  assert abs(low.value - low.bias) < 0.6 * low.value


@pytest.mark.parametrize('method', ['percentile', 'bca'])
def test_interval_covers_as_often_as_it_says(method):
  trials, below, above = 600, 0, 0
  mean = lambda x: float(x.sum()) / len(x)
  for seed in range(trials):
    x = np.random.default_rng(seed).normal(size=60)
    found = bootstrap_interval(
      mean, x, samples=300, seed=seed, level=0.8, method=method
    )
    below += found.high < 0
    above += found.low > 0
  # A normal mean: each end misses one time in ten, 12 of 600 by chance more or
  # less (three sigma: 22); 60 rows and 300 draws cost half a per cent.
  for missed in (below, above):
    assert abs(missed - 0.105 * trials) < 22


def test_bca_levels_stop_at_the_end_of_the_scale():
  # An outlier gives the largest acceleration, 1 / 6; a metric below which all
  # resamples fall gives the largest bias: the upper level is past the pole.
  x = np.append(np.random.default_rng(0).normal(size=200), 1e4)
  found = bootstrap_interval(
    lambda x: float(np.unique(x).sum()), x, samples=2000, level=0.999
  )
  draws = np.random.default_rng(0).integers(0, 201, (2000, 201))
  largest = max(np.unique(x[row]).sum() for row in draws)
  assert found.low <= found.high
  assert found.high == pytest.approx(largest)


def test_groups_widen_an_interval_of_repeated_rows():
  x = np.random.default_rng(2).normal(size=30)
  rows, groups = np.repeat(x, 4), np.repeat(np.arange(30), 4)
  error = lambda **kw: bootstrap_interval(np.mean, rows, **kw).standard_error
  naive, right = error(), error(groups=groups)
  assert right / naive == pytest.approx(2, rel=0.15)  # sqrt(4)
  assert right == pytest.approx(x.std() / np.sqrt(30), rel=0.1)


def test_undefined_resamples_are_counted_and_left_out():
  labels = np.array([1, 0, 0, 0, 0, 0])
  scores = np.arange(6.0)

  def metric(y, s):
    if y.min() == y.max():
      warnings.warn('one class', UndefinedMetricWarning, stacklevel=2)
      return float('nan')
    return _auc(y, s)

  with warnings.catch_warnings():
    warnings.simplefilter('error')
    found = bootstrap_interval(metric, labels, scores, samples=500)
  # Pr(no positive drawn) = (5/6)^6 = .335
  assert 120 < found.undefined < 220
  assert np.isfinite([found.low, found.high]).all()
  nothing = bootstrap_interval(lambda y: float('nan'), labels, samples=100)
  assert np.isnan(nothing.low)
  assert nothing.undefined == 100


def _delong_by_loops(labels, scores):
  """Structural components by the double loop of the paper."""
  pos, neg = scores[labels == 1], scores[labels == 0]
  psi = (pos[:, None] > neg[None]) + 0.5 * (pos[:, None] == neg[None])
  v, w = psi.mean(1), psi.mean(0)
  cov = np.cov(v.T) / len(pos) + np.cov(w.T) / len(neg)
  return v.mean(0), cov


def test_delong_equals_the_double_loop_with_ties():
  rng = np.random.default_rng(3)
  labels, a, b = _two_models(rng)
  scores = np.round(np.stack([a, b], 1), 1)
  auc, cov = delong_covariance(labels, scores)
  want_auc, want_cov = _delong_by_loops(labels, scores)
  np.testing.assert_allclose(auc, want_auc, rtol=1e-12)
  np.testing.assert_allclose(cov, want_cov, rtol=1e-12)
  assert auc[0] == pytest.approx(roc_auc_score(labels, scores[:, 0]))


def test_delong_and_paired_bootstrap_agree():
  rng = np.random.default_rng(4)
  labels, a, b = _two_models(rng, 120)
  difference, error, p = delong_difference(labels, a, b)
  found = bootstrap_difference(_auc, labels, a, b, samples=1000)
  assert found.value == pytest.approx(difference)
  assert found.standard_error == pytest.approx(error, rel=0.12)
  assert 0 < p <= 1


def test_pairing_cancels_what_models_share():
  rng = np.random.default_rng(5)
  labels, a, b = _two_models(rng, 120)
  _, paired, _ = delong_difference(labels, a, b)
  _, cov = delong_covariance(labels, np.stack([a, b], 1))
  assert paired < 0.9 * np.sqrt(cov[0, 0] + cov[1, 1])


def test_equal_models_differ_by_nothing():
  labels, a, _ = _two_models(np.random.default_rng(6))
  assert delong_difference(labels, a, a) == (0, 0, 1)


def test_detectable_difference_has_the_power_it_claims():
  assert detectable_difference(1.0) == pytest.approx(
    1.959964 + 0.841621, abs=1e-5
  )
  # Two real comparisons: a model that is better by a known AUC, on new bags
  # each time. What it predicts from the errors is how often they are told
  # apart, by a test that knows nothing of it.
  rng, trials = np.random.default_rng(7), 1500
  labels = np.arange(120) % 2
  shared = rng.normal(size=(trials, 120))
  noise = rng.normal(size=(2, trials, 120))
  a, b = (
    shift * labels + shared + 0.8 * part
    for shift, part in zip((1.9, 1.4), noise, strict=True)
  )
  found = np.array([
    delong_difference(labels, x, y) for x, y in zip(a, b, strict=True)
  ])  # fmt: skip
  true = stats.norm.cdf(np.array([1.9, 1.4]) / np.sqrt(2 * 1.64))
  power = np.mean(found[:, 2] < 0.05)
  assert 0.3 < power < 0.95
  predicted = detectable_difference(
    found[:, 0].std(), power=float(power), level=0.05
  )
  assert predicted == pytest.approx(true[0] - true[1], rel=0.06)


@pytest.mark.parametrize(
  ('call', 'words'),
  [
    (lambda: bootstrap_interval(np.mean, [1.0, 2], samples=5), 'samples'),
    (lambda: bootstrap_interval(np.mean, [1.0, 2], level=2), 'level'),
    (lambda: bootstrap_interval(np.mean, [1.0, 2], method='t'), 'method'),
    (lambda: bootstrap_interval(np.mean, [1.0, 2], [1.0]), 'one length'),
    (lambda: bootstrap_interval(np.mean, [1.0]), 'two units'),
    (lambda: bootstrap_interval(np.mean, [1.0, 2], groups=[0]), 'groups'),
    (lambda: delong_covariance([1, 0, 0], [1.0, 2, 3]), 'two positives'),
    (lambda: detectable_difference(-1), 'standard_error'),
    (lambda: detectable_difference(1, power=1), 'power'),
  ],
)
def test_errors(call, words):
  with pytest.raises(ValueError, match=words):
    call()
