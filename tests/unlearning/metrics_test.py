"""Metrics by hand, by brute force and against SciPy."""

import itertools
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from absl.testing import absltest

from tmlib import unlearning as ul


class MetricsTest(absltest.TestCase):
  def test_gap_and_centring(self):
    f = np.array([[1.0, 2.0], [0.0, 0.0]])
    # A shift of logits is no gap.
    self.assertAlmostEqual(ul.gap_norm(f + 5, f), 0)
    self.assertAlmostEqual(ul.gap_norm(f + 5, f, logits=False), 50**0.5)
    # Row gaps (1, -1) and 0: mean square is 2 / 2.
    g = f + [[1.0, -1.0], [0.0, 0.0]]
    self.assertAlmostEqual(ul.gap_norm(g, f), 1)

  def test_kl(self):
    # p_R = (3/4, 1/4), p = (1/2, 1/2).
    want = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    got = ul.kl_to_retrained([[7.0, 7.0]], [[np.log(3.0), 0.0]])
    np.testing.assert_allclose(got, [want])

  def test_ks_by_enumeration(self):
    a, b = np.array([0.1, 0.4, 0.7]), np.array([0.5, 0.8, 0.9, 1.2])

    def distance(a, b):
      at = np.concatenate([a, b])
      cdf = lambda s: (s[None] <= at[:, None]).mean(1)
      return np.abs(cdf(a) - cdf(b)).max()

    both = np.concatenate([a, b])
    ds = [
      distance(both[list(i)], np.delete(both, list(i)))
      for i in itertools.combinations(range(7), 3)
    ]
    statistic, p = ul.forget_quality_ks(a, b)
    self.assertAlmostEqual(statistic, distance(a, b))
    self.assertAlmostEqual(p, np.mean(np.array(ds) >= distance(a, b) - 1e-12))

  def test_tofu_log_by_hand(self):
    forget = {
      'avg_paraphrased_loss': {'0': 1.0, '7': 0.5},
      'average_perturb_loss': {'0': [2.0, 4.0], '7': [0.5, 0.5]},
    }
    folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
    (folder / 'one.json').write_text(json.dumps(forget))
    both = {'eval_log.json': {}, 'eval_log_forget.json': forget}
    (folder / 'all.json').write_text(json.dumps(both))
    for name in ('one.json', 'all.json'):
      got = ul.tofu_truth_ratios(folder / name)
      # Per token: wrong e^-3 (geometric mean), right e^-1.
      self.assertAlmostEqual(got['0'], np.exp(-2))
      self.assertAlmostEqual(got['7'], 1)
    (folder / 'none.json').write_text('{}')
    with pytest.raises(ValueError, match='avg_paraphrased_loss'):
      ul.tofu_truth_ratios(folder / 'none.json')

  def test_ks_of_tofu_logs(self):
    """TOFU_LOGS names the `data` folder of a checkout of locuslab/tofu."""
    folder = os.environ.get('TOFU_LOGS')
    if not folder:
      self.skipTest('TOFU_LOGS is not set')
    log = 'eval_results/ds_size300/eval_log_aggregated.json'
    read = lambda run: ul.tofu_truth_ratios(Path(folder) / run / log)
    full = read('ft_epoch5_lr2e-05_phi_full_wd0.01')
    for size in (90, 95, 99):
      retrained = read(f'ft_epoch5_lr2e-05_phi_retain{size}_wd0.01')
      shared = [k for k in full if k in retrained]
      pair = [[r[k] for k in shared] for r in (full, retrained)]
      want = scipy.stats.ks_2samp(*pair)
      got = ul.forget_quality_ks(*pair)
      np.testing.assert_allclose(got, (want.statistic, want.pvalue))

  def test_membership(self):
    self.assertEqual(ul.membership_auc([0.1, 0.2], [1.0, 2.0]), 1.0)
    # Pairs: 1<2 yes, 1<1 tie, 3<2 no, 3<1 no.
    self.assertEqual(ul.membership_auc([1.0, 3.0], [2.0, 1.0]), 0.375)

  def test_truth_ratio(self):
    got = ul.truth_ratio(np.log([[0.2, 0.05]]), np.log([0.4]))
    np.testing.assert_allclose(got, [0.25])

  def test_relative_error(self):
    error, cos = ul.relative_error([3.0, 0.0], [3.0, 4.0])
    self.assertAlmostEqual(error, 0.8)
    self.assertAlmostEqual(cos, 0.6)

  def test_bad_input(self):
    with pytest.raises(ValueError, match='unlearned is empty'):
      ul.forget_quality_ks([], [1.0])
    with pytest.raises(ValueError, match='retrained holds NaN'):
      ul.forget_quality_ks([1.0], [np.nan])
    with pytest.raises(ValueError, match='needs members'):
      ul.membership_auc([], [1.0])


if __name__ == '__main__':
  absltest.main()
