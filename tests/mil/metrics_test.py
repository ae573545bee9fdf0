import numpy as np
import pytest
from sklearn import metrics as sk

from tmlib.mil import metrics
from tmlib.ops.statistics import UndefinedMetricWarning, bootstrap_interval


@pytest.fixture(params=range(3))
def case(request):
  """Labels, tied probabilities and predictions of three classes."""
  rng = np.random.default_rng(request.param)
  labels = rng.integers(0, 3, 120)
  p = rng.dirichlet(np.ones(3), 120) + np.eye(3)[labels] * 0.3
  p = np.round(p / p.sum(1, keepdims=True), 2) + 1e-3
  p /= p.sum(1, keepdims=True)
  return labels, p, p.argmax(1)


def test_auroc_by_hand():
  # Pairs: .8 > .3, .8 > .5, .5 > .3, .5 = .5: (3 + 1/2) / 4.
  assert metrics.auroc([1, 1, 0, 0], [0.8, 0.5, 0.3, 0.5]) == 3.5 / 4


def test_everything_equals_scikit_learn(case):
  labels, p, predictions = case
  binary, score = (labels == 1).astype(int), np.round(p[:, 1], 1)
  pairs = {
    'auroc': (metrics.auroc(binary, score), sk.roc_auc_score(binary, score)),
    'macro auroc': (
      metrics.auroc(labels, p),
      sk.roc_auc_score(labels, p, multi_class='ovr'),
    ),
    'average precision': (
      metrics.average_precision(binary, score),
      sk.average_precision_score(binary, score),
    ),
    'balanced accuracy': (
      metrics.balanced_accuracy(labels, predictions),
      sk.balanced_accuracy_score(labels, predictions),
    ),
    'macro f1': (
      metrics.macro_f1(labels, predictions),
      sk.f1_score(labels, predictions, average='macro'),
    ),
    'log loss': (metrics.log_loss(labels, p), sk.log_loss(labels, p)),
  }
  for weights in (None, 'linear', 'quadratic'):
    pairs[f'kappa {weights}'] = (
      metrics.cohen_kappa(labels, predictions, weights),
      sk.cohen_kappa_score(labels, predictions, weights=weights),
    )
  for name, (ours, theirs) in pairs.items():
    assert ours == pytest.approx(theirs, rel=1e-12), name
  np.testing.assert_array_equal(
    metrics.confusion_matrix(labels, predictions),
    sk.confusion_matrix(labels, predictions),
  )
  ours = metrics.roc_curve(binary, score)
  theirs = sk.roc_curve(binary, score, drop_intermediate=False)
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-12)


def test_classes_that_do_not_occur():
  labels, predictions = np.array([0, 0, 2, 2]), np.array([0, 2, 2, 2])
  assert metrics.balanced_accuracy(labels, predictions) == 0.75
  assert metrics.macro_f1(labels, predictions) == pytest.approx(
    sk.f1_score(labels, predictions, average='macro')
  )
  p = np.eye(3)[predictions]
  with pytest.warns(UndefinedMetricWarning, match='auroc of class 1'):
    found = metrics.auroc(labels, p)
  assert found == 0.75  # the mean over classes 0 and 2
  assert metrics.confusion_matrix(labels, predictions, 4).shape == (4, 4)


def test_undefined_is_nan_and_says_which():
  one = np.ones(4, int)
  for name, call in {
    'auroc': lambda: metrics.auroc(one, np.arange(4.0)),
    'average_precision': lambda: metrics.average_precision(
      one * 0, np.arange(4.0)
    ),
    'cohen_kappa': lambda: metrics.cohen_kappa(one, one),
  }.items():
    with pytest.warns(UndefinedMetricWarning, match=f'{name} is undefined'):
      assert np.isnan(call())
  with pytest.warns(UndefinedMetricWarning, match='roc_curve'):
    assert np.isnan(metrics.roc_curve(one, np.arange(4.0))[0][1:]).all()


@pytest.mark.parametrize(
  ('call', 'words'),
  [
    (lambda: metrics.auroc([0, 1], [0.1, np.nan]), 'NaN for 1 of 2 bags'),
    (lambda: metrics.auroc([0, 1], [0.1]), 'as long as'),
    (lambda: metrics.auroc([], []), 'not empty'),
    (lambda: metrics.confusion_matrix([0, 3], [0, 1], 2), r'in \[0, 2\)'),
    (lambda: metrics.confusion_matrix([0, -1], [0, 1]), 'class indices'),
    (lambda: metrics.cohen_kappa([0, 1], [0, 1], 'cubic'), "'linear' or"),
  ],
)
def test_errors(call, words):
  with pytest.raises(ValueError, match=words):
    call()


def test_summary_is_complete():
  labels = np.array([0, 1, 1, 0, 1])
  p1 = np.array([0.2, 0.9, 0.4, 0.1, 0.8])
  found = metrics.classification_summary(labels, np.stack([1 - p1, p1], 1))
  assert found['auroc'] == 1
  assert found['accuracy'] == 0.8
  assert found['average_precision'] == 1
  three = metrics.classification_summary([0, 1, 2], np.eye(3))
  assert 'average_precision' not in three


def test_pooled_out_of_fold():
  # Two repeats of four bags in two folds, in the order folds finish.
  ids = np.array([2, 0, 1, 3, 3, 1, 0, 2])
  repeats = np.array([0, 0, 0, 0, 1, 1, 1, 1])
  scores = ids + 10.0 * repeats
  table = metrics.pool_out_of_fold(ids, repeats, scores)
  np.testing.assert_array_equal(table, [[0, 10], [1, 11], [2, 12], [3, 13]])
  with pytest.raises(ValueError, match='bag 2 has 2 predictions in repeat 0'):
    metrics.pool_out_of_fold([0, 1, 2, 2], [0] * 4, np.zeros(4))
  with pytest.raises(ValueError, match='bag 1 has 0 predictions'):
    metrics.pool_out_of_fold([0, 2], [0, 0], np.zeros(2))


def test_repeats_share_their_resamples():
  rng = np.random.default_rng(0)
  labels = np.arange(60) % 2
  score = labels + rng.normal(size=60)
  lifted = metrics.over_repeats(metrics.auroc)
  once = bootstrap_interval(metrics.auroc, labels, score, samples=300)
  # Five copies of one repeat carry no more information than one.
  five = bootstrap_interval(
    lifted, labels, np.repeat(score[:, None], 5, 1), samples=300
  )
  assert five.value == pytest.approx(once.value)
  assert five.standard_error == pytest.approx(once.standard_error)
