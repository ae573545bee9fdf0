"""Survival losses and metrics against their definitions, written as loops."""

import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from scipy import stats

from tmlib.mil import survival

GOLDENS = pathlib.Path(__file__).parents[4] / 'shared/data/mil_goldens'


def cohort(n, seed=0, ties=True, censored=0.4):
  rng = np.random.default_rng(seed)
  time = rng.exponential(10, n)
  time = np.ceil(time) if ties else time
  event = rng.random(n) > censored
  event[np.argmin(time)] = True
  risk = np.round(rng.normal(size=n) - 0.05 * time, 1)
  return time, event, risk


def true_cox(risk, time, event, ties, strata=None):
  risk = np.asarray(risk, np.float64)
  strata = np.zeros(len(risk)) if strata is None else strata
  total = 0.0
  for s in np.unique(strata):
    for t in np.unique(time[event & (strata == s)]):
      at_risk = np.exp(risk[(time >= t) & (strata == s)]).sum()
      died = (time == t) & event & (strata == s)
      own, d = np.exp(risk[died]).sum(), died.sum()
      for rank in range(d):
        share = rank / d if ties == 'efron' else 0
        total += np.log(at_risk - share * own)
      total -= risk[died].sum()
  return total


class TestCox:
  @pytest.mark.parametrize('ties', ['efron', 'breslow'])
  @pytest.mark.parametrize('n', [1, 7, 60])
  def test_equals_its_definition_with_gradient(self, n, ties):
    time, event, risk = cohort(n)
    strata = np.arange(n) % 2
    with jax.enable_x64(True):
      loss = lambda r, s: survival.cox_sums(
        r, jnp.asarray(time), jnp.asarray(event), ties=ties, strata=s
      )[0]
      for s in (None, strata):
        got = jax.jit(loss)(jnp.asarray(risk), s)
        want = true_cox(risk, time, event, ties, s)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        grad = jax.jit(jax.grad(loss))(jnp.asarray(risk), s)
        for i in range(min(n, 9)):
          step = np.eye(n)[i] * 1e-5
          slope = (
            true_cox(risk + step, time, event, ties, s)
            - true_cox(risk - step, time, event, ties, s)
          ) / 2e-5
          np.testing.assert_allclose(grad[i], slope, atol=1e-7)

  def test_by_hand(self):
    # Times 1, 2, 2, 3; events at 1 and both 2s; all risks zero.
    time = jnp.asarray([2.0, 1.0, 3.0, 2.0])
    event = jnp.asarray([1, 1, 0, 1])
    zero = jnp.zeros(4)
    loss = lambda **o: survival.cox_nll(zero, time, event, **o)
    breslow = np.log(4) + 2 * np.log(3)
    efron = np.log(4) + np.log(3) + np.log(2)
    np.testing.assert_allclose(
      loss(ties='breslow', reduction='sum'), breslow, rtol=1e-6
    )
    np.testing.assert_allclose(loss(reduction='sum'), efron, rtol=1e-6)
    np.testing.assert_allclose(loss(), efron / 3, rtol=1e-6)
    np.testing.assert_allclose(loss(reduction='mean'), efron / 4, rtol=1e-6)

  def test_no_event_is_zero_and_so_is_its_gradient(self):
    time = jnp.arange(1.0, 5.0)
    for n in (4, 1):
      value, grad = jax.jit(jax.value_and_grad(survival.cox_nll))(
        jnp.ones(n), time[:n], jnp.zeros(n, bool)
      )
      assert value == 0
      np.testing.assert_array_equal(grad, 0)
    _, events = survival.cox_sums(jnp.ones(4), time, jnp.zeros(4, bool))
    assert events == 0

  def test_padding_and_large_risks(self):
    time, event, risk = cohort(30, seed=1)
    pad = lambda x, v: jnp.asarray(np.append(x, [v, v]))
    mask = jnp.arange(32) < 30
    args = (jnp.asarray(time), jnp.asarray(event))
    big = 200 * risk
    loss_of = jax.jit(survival.cox_nll)
    want = loss_of(jnp.asarray(big), *args)
    got = loss_of(
      pad(big, np.nan), pad(time, np.nan), pad(event, True), mask=mask
    )
    assert np.isfinite(want)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    loss = lambda r: survival.cox_nll(
      r, pad(time, 0), pad(event, True), mask=mask
    )
    grad = jax.jit(jax.grad(loss))(pad(big, 0))
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(grad[30:], 0)

  def test_risk_sets_span_the_devices(self):
    time, event, risk = cohort(16, seed=2)
    mesh = jax.make_mesh(
      (4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    local = lambda *a: survival.cox_sums(*a, axis_name='data')
    split = jax.shard_map(
      local, mesh=mesh, in_specs=P('data'), out_specs=P(), check_vma=False
    )
    args = [jnp.asarray(x) for x in (risk, time, event)]
    np.testing.assert_allclose(
      jax.jit(split)(*args)[0], survival.cox_sums(*args)[0], rtol=1e-6
    )

  def test_bad_options_are_named(self):
    args = (jnp.ones(2), jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match="ties='exact'"):
      survival.cox_nll(*args, ties='exact')
    with pytest.raises(ValueError, match='reduction'):
      survival.cox_nll(*args, reduction='average')


class TestDiscrete:
  def test_equals_the_clamped_public_form_at_moderate_logits(self):
    rng = np.random.default_rng(0)
    logits = rng.uniform(-9, 9, (50, 4))
    y, censored = rng.integers(0, 4, 50), rng.integers(0, 2, 50)
    for alpha in (0.0, 0.4):
      hazards = 1 / (1 + np.exp(-logits))
      alive = np.cumprod(np.append(np.ones((50, 1)), 1 - hazards, 1), 1)
      rows = np.arange(50)
      # Far below the public 1e-7, to be exact here.
      log = lambda x: np.log(np.maximum(x, 1e-30))
      seen = -log(alive[rows, y]) - log(hazards[rows, y])
      hidden = -log(alive[rows, y + 1])
      want = np.where(censored, (1 - alpha) * hidden, seen)
      got = survival.discrete_nll(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(y),
        jnp.asarray(censored),
        alpha=alpha,
        reduction='none',
      )
      np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)

  def test_its_gradient_never_dies(self):
    loss = lambda x, y, c: survival.discrete_nll(
      x, jnp.asarray([y]), jnp.asarray([c])
    )
    x = jnp.asarray([[-100.0, 0, 0, 0]])
    value, grad = jax.value_and_grad(loss)(x, 0, 0)
    np.testing.assert_allclose(value, 100)
    np.testing.assert_allclose(grad[0, 0], -1)
    value, grad = jax.value_and_grad(loss)(jnp.full((1, 4), 20.0), 3, 1)
    np.testing.assert_allclose(value, 80)
    np.testing.assert_allclose(grad[0], 1)

  def test_padding_and_reductions(self):
    logits = jnp.asarray([[0.0, 0.0], [np.nan, np.nan]])
    y, c = jnp.asarray([1, 0]), jnp.asarray([0, 0])
    mask = jnp.asarray([True, False])
    loss = lambda **o: survival.discrete_nll(logits, y, c, mask=mask, **o)
    np.testing.assert_allclose(loss(), 2 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(loss(reduction='sum'), loss())
    assert loss(reduction='none').shape == (2,)
    with pytest.raises(ValueError, match='alpha'):
      loss(alpha=1.5)

  def test_curves_from_logits(self):
    logits = jnp.log(jnp.asarray([[1.0, 1.0, 1 / 3]]))  # hazards 1/2 1/2 1/4
    want = [[0.5, 0.25, 0.1875]]
    got = survival.hazards_to_survival(logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(
      survival.risk_score(logits), [-0.9375], rtol=1e-6
    )


def true_pairs(time, event, risk):
  better = worse = tied = 0
  for i in range(len(time)):
    for j in range(len(time)):
      later = time[i] < time[j] or (time[i] == time[j] and not event[j])
      if i != j and event[i] and later:
        gap = risk[i] - risk[j]
        tied += abs(gap) <= 1e-8
        better += gap > 1e-8
        worse += gap < -1e-8
  return better, worse, tied


class TestConcordance:
  @settings(max_examples=40, deadline=None)
  @given(st.sampled_from([2, 9, 60]), st.integers(0, 10**6), st.floats(0, 0.9))
  def test_equals_a_loop_over_pairs(self, n, seed, censored):
    time, event, risk = cohort(n, seed, censored=censored)
    want = true_pairs(time, event, risk)
    assert tuple(survival.concordance_pairs(time, event, risk)) == want
    good, total = survival.concordance_sums(
      *map(jnp.asarray, (time, event, risk.astype(np.float32)))
    )
    np.testing.assert_allclose(good, want[0] + want[2] / 2)
    np.testing.assert_allclose(total, sum(want))

  @pytest.mark.parametrize('levels', [3, 40, 10**9])
  def test_over_many_blocks(self, levels):
    rng = np.random.default_rng(0)
    n = 1700
    time = rng.integers(0, levels, n).astype(float)
    event, risk = rng.random(n) < 0.5, np.round(rng.normal(size=n), 1)
    gap = risk[:, None] - risk
    pair = event[:, None] & (
      (time[:, None] < time) | ((time[:, None] == time) & ~event)
    )
    want = [(pair & m).sum() for m in (gap > 1e-8, gap < -1e-8)]
    got = survival.concordance_pairs(time, event, risk)
    assert [got.concordant, got.discordant] == want
    assert got.comparable == pair.sum()

  @pytest.mark.skipif(not GOLDENS.exists(), reason=f'{GOLDENS} is absent')
  def test_published_figures(self):
    """Risks of a published AMIL on TCGA-BLCA, and the C-indices printed."""
    with (GOLDENS / 'tcga_blca_risks.csv').open() as file:
      rows = list(csv.DictReader(file))
    with (GOLDENS / 'tcga_blca_summary.csv').open() as file:
      summary = {
        r['folds']: float(r['val_cindex']) for r in csv.DictReader(file)
      }
    assert len(summary) == 5
    for fold, want in summary.items():
      own = [r for r in rows if r['fold'] == fold]
      column = lambda name, own=own: np.asarray([float(r[name]) for r in own])
      got = survival.concordance_index(
        column('survival_months'), 1 - column('censorship'), column('risk')
      )
      np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)

  def test_ipcw_by_hand(self):
    # Training: G drops to 1/2 at time 2. Pairs of event 1 weigh 1, of event
    # 3 weigh 4.
    train = ([1.0, 2.0, 3.0], [1, 0, 1])
    time, event = [1.0, 3.0, 4.0], [1, 1, 0]
    risk = [3.0, 1.0, 2.0]  # (1, 3), (1, 4) right; (3, 4) wrong
    got = survival.concordance_index_ipcw(*train, time, event, risk)
    np.testing.assert_allclose(got, 2 / (2 + 4))
    got = survival.concordance_index_ipcw(*train, time, event, risk, tau=3.0)
    assert got == 1

  def test_undefined_is_an_error_not_a_half(self):
    index = survival.concordance_index
    with pytest.raises(ValueError, match='all patients are censored'):
      index([1, 2], [0, 0], [1, 2])
    with pytest.raises(ValueError, match='no pair'):
      index([1, 2], [0, 1], [1, 2])
    with pytest.raises(ValueError, match=r'risk\[1\] = nan'):
      index([1, 2], [1, 1], [1, np.nan])
    with pytest.raises(ValueError, match=r'time\[0\] = -1'):
      index([-1, 2], [1, 1], [1, 2])
    with pytest.raises(ValueError, match='event holds'):
      index([1, 2], [1, 2], [1, 2])
    with pytest.raises(ValueError, match='beyond the last training time'):
      survival.concordance_index_ipcw(
        [1, 2], [1, 0], [1, 5, 6], [1, 1, 0], [3, 2, 1]
      )


class TestCurves:
  def test_kaplan_meier_by_hand(self):
    curve = survival.kaplan_meier([1, 2, 2, 3, 4], [1, 1, 0, 0, 1])
    np.testing.assert_allclose(curve.survival, [0.8, 0.6, 0.6, 0])
    np.testing.assert_array_equal(curve.at_risk, [5, 4, 2, 1])
    # Greenwood: S^2 sum d / (n (n - d)).
    want = 0.6 * np.sqrt(1 / 20 + 1 / 12)
    np.testing.assert_allclose(curve.std[1], want)
    np.testing.assert_allclose(curve.at([0.5, 1, 2.5]), [1, 0.8, 0.6])

  def test_without_censoring_it_is_the_empirical_curve(self):
    time = np.random.default_rng(0).integers(0, 20, 100)
    curve = survival.kaplan_meier(time, np.ones(100))
    want = (time[None] > curve.time[:, None]).mean(1)
    np.testing.assert_allclose(curve.survival, want, atol=1e-12)

  def test_logrank_of_two_groups_by_hand(self):
    # Events at 1 (group a of 2 + 2), 2 (group b of 1 + 2).
    test = survival.logrank([1, 3, 2, 4], [1, 0, 1, 0], list('aabb'))
    np.testing.assert_allclose(test.expected, [1 / 2 + 1 / 3, 1 / 2 + 2 / 3])
    variance = 1 / 4 + 2 / 9
    want = (1 - 5 / 6) ** 2 / variance
    np.testing.assert_allclose(test.statistic, want)
    np.testing.assert_allclose(test.pvalue, stats.chi2.sf(want, 1))

  def test_logrank_is_calibrated_for_three_groups(self):
    values = []
    for seed in range(300):
      time, event, _ = cohort(60, seed, ties=seed % 2 == 0)
      group = np.random.default_rng(seed + 1000).integers(0, 3, 60)
      values.append(survival.logrank(time, event, group).pvalue)
    assert stats.kstest(values, 'uniform').pvalue > 1e-3
    time, event, _ = cohort(200)
    group = (time > np.median(time)).astype(int)
    assert survival.logrank(time, event, group).pvalue < 1e-6


class TestScores:
  def test_without_censoring_they_are_the_plain_ones(self):
    rng = np.random.default_rng(0)
    time, risk = rng.exponential(10, 80), rng.normal(size=80)
    seen = np.ones(80)
    times = np.quantile(time, [0.2, 0.5, 0.7])
    alive = rng.random((80, 3))
    got = survival.brier_score(time, seen, time, seen, alive, times)
    want = ((alive - (time[:, None] > times)) ** 2).mean(0)
    np.testing.assert_allclose(got, want)
    auc = survival.cumulative_dynamic_auc(time, seen, time, seen, risk, times)
    for k, t in enumerate(times):
      u = stats.mannwhitneyu(risk[time <= t], risk[time > t]).statistic
      share = u / (time <= t).sum() / (time > t).sum()
      np.testing.assert_allclose(auc.auc[k], share)
    assert auc.auc.min() <= auc.mean <= auc.auc.max()

  def test_a_known_curve_has_the_brier_score_of_its_variance(self):
    """E BS(t) = S (1 - S) for the true curve, whatever the censoring."""
    rng = np.random.default_rng(0)
    n = 20_000
    death, visit = rng.exponential(10, n), rng.exponential(15, n)
    time, event = np.minimum(death, visit), death <= visit
    times = np.asarray([3.0, 8.0, 15.0])
    true = np.exp(-times / 10)
    got = survival.brier_score(
      time, event, time, event, np.tile(true, (n, 1)), times
    )
    np.testing.assert_allclose(got, true * (1 - true), atol=0.006)
    total = survival.integrated_brier_score(
      time, event, time, event, np.tile(true, (n, 1)), times
    )
    np.testing.assert_allclose(total, np.trapezoid(got, times) / 12, rtol=1e-12)

  def test_bad_times_are_named(self):
    args = ([1, 2, 3], [1, 0, 1], [1, 2, 3], [1, 1, 0])
    with pytest.raises(ValueError, match='followed up'):
      survival.brier_score(*args, np.ones((3, 1)), [9.0])
    with pytest.raises(ValueError, match='patients by times'):
      survival.brier_score(*args, np.ones((3, 2)), [2.0])
    with pytest.raises(ValueError, match=r'\[0, 1\]'):
      survival.brier_score(*args, np.full((3, 1), 2.0), [2.0])


def test_bins_are_quantiles_of_event_times():
  time, event = np.arange(1.0, 101.0), np.arange(100) % 2 == 0
  edges = survival.quantile_bins(time, event, 4)
  np.testing.assert_allclose(edges, np.quantile(time[event], [0.25, 0.5, 0.75]))
  bins = survival.digitize([0, edges[0], 99, 500], edges)
  np.testing.assert_array_equal(bins, [0, 1, 3, 3])
  with pytest.raises(ValueError, match='coincide'):
    survival.quantile_bins([1, 1, 1, 5, 6, 7], [1, 1, 1, 1, 1, 1], 4)
  with pytest.raises(ValueError, match='more than the 2 distinct times'):
    survival.quantile_bins([1, 1, 5, 9], [1, 1, 1, 0], 3)
  with pytest.raises(ValueError, match='censored'):
    survival.quantile_bins([1, 2], [0, 0])


class TestPeer:
  """Against scikit-survival, where it is installed."""

  @pytest.fixture
  def sksurv(self):
    pytest.importorskip('sksurv')
    from sksurv import compare, metrics, nonparametric, util

    return compare, metrics, nonparametric, util

  @pytest.mark.parametrize('seed', range(6))
  def test_all_metrics(self, sksurv, seed):
    compare, metrics, nonparametric, util = sksurv
    train_time, train_event, _ = cohort(300, seed + 100)
    time, event, risk = cohort(200, seed, ties=seed % 2 == 0)
    keep = time < train_time.max()
    time, event, risk = time[keep], event[keep], risk[keep]
    table = util.Surv.from_arrays
    y, y_train = table(event, time), table(train_event, train_time)
    np.testing.assert_allclose(
      survival.concordance_index(time, event, risk),
      metrics.concordance_index_censored(event, time, risk)[0],
      rtol=1e-12,
    )
    for tau in (None, 20.0):
      np.testing.assert_allclose(
        survival.concordance_index_ipcw(
          train_time, train_event, time, event, risk, tau=tau
        ),
        metrics.concordance_index_ipcw(y_train, y, risk, tau=tau)[0],
        rtol=1e-12,
      )
    times = np.unique(np.quantile(time, [0.2, 0.4, 0.6, 0.8]))
    alive = np.random.default_rng(seed).random((len(time), len(times)))
    train = (train_time, train_event, time, event)
    np.testing.assert_allclose(
      survival.brier_score(*train, alive, times),
      metrics.brier_score(y_train, y, alive, times)[1],
      rtol=1e-12,
    )
    auc = survival.cumulative_dynamic_auc(*train, risk, times)
    want, mean = metrics.cumulative_dynamic_auc(y_train, y, risk, times)
    np.testing.assert_allclose(auc.auc, want, rtol=1e-10)
    np.testing.assert_allclose(auc.mean, mean, rtol=1e-10)
    curve = survival.kaplan_meier(time, event)
    t, s = nonparametric.kaplan_meier_estimator(event, time)
    np.testing.assert_allclose(curve.time, t)
    np.testing.assert_allclose(curve.survival, s, atol=1e-14)
    group = np.arange(len(time)) % 3
    chi2, p = compare.compare_survival(y, group)
    test = survival.logrank(time, event, group)
    np.testing.assert_allclose(
      [test.statistic, test.pvalue], [chi2, p], rtol=1e-8
    )
