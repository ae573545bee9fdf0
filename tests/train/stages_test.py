"""Stages: one run whose method changes."""

import jax
import numpy as np
import optax
import pytest

from tests.train import toy
from tmlib import train

ADAM, SGD = optax.adam(3e-3), optax.sgd(1e-2)


def enter(state, data):
  """A new optimizer, and an average that starts here: another structure."""
  assert data.batch_size == 8
  return state.replace(
    opt_state=SGD.init(state.params), ema_params=state.params
  )


def stages(first=6, second=8, third=4, enter=enter):
  return [
    train.Stage('adam', first, toy.build(ADAM)),
    train.Stage('sgd', second, toy.build(SGD, ema_decay=0.9), enter),
    # Another stream, the same state.
    train.Stage(
      'long', third, toy.build(SGD, ema_decay=0.9), None, toy.data(16, seed=1)
    ),
  ]


def fit(workdir=None, until=None, **options):
  rows = toy.Rows()
  result = train.fit(
    data=toy.data(), stages=options.pop('stages', stages()), workdir=workdir,
    options=train.Options(**({'log_every': 1, 'save_every': 50} | options)),
    stop=None if until is None else lambda _: len(rows.rows) + 1 >= until,
    evaluations={'held_out': toy.held_out()}, writers=[rows],
  )  # fmt: skip
  return result, rows


@pytest.fixture(scope='module')
def whole():
  return fit()


def test_the_stages_are_what_one_writes_by_hand(whole):
  result, rows = whole
  assert list(rows.rows) == list(range(1, 19))
  assert [c['stage'] for c in result.costs] == ['adam', 'sgd', 'long']
  first = train.fit(
    toy.build(ADAM), toy.data(), steps=6, options=train.Options(log_every=1)
  )
  state = enter(first.state, toy.data())
  update = jax.jit(toy.build(SGD, ema_decay=0.9)(None).update)
  for step in range(6, 18):
    data = toy.data() if step < 14 else toy.data(16, seed=1)
    state, _ = update(state, data.load(step, slice(0, data.batch_size)))
  toy.assert_close(result.state, state)
  assert result.step == 18


@pytest.mark.parametrize('parts', [(3,), (6,), (9, 14), (16,)])
def test_resume_within_a_stage_and_at_its_end(tmp_path, whole, parts):
  done = 0
  for until in parts:
    result, _ = fit(tmp_path, until - done)
    assert (result.status, result.step) == ('stopped', until)
    done = until
  result, rows = fit(tmp_path)
  assert list(rows.rows) == list(range(done + 1, 19))
  toy.assert_same(result.state, whole[0].state)


def test_a_saved_boundary_resumes_with_its_entrance(tmp_path, whole):
  # Saved at the end of the first stage, before `enter`; then killed.
  def killed(state, data):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    fit(tmp_path, save_every=6, stages=stages(enter=killed))
  result, _ = fit(tmp_path)
  toy.assert_same(result.state, whole[0].state)


def test_a_stage_that_comes_again_is_not_compiled_again():
  counts, rows = {}, toy.Rows()
  again = toy.counting(toy.build(ADAM), counts)
  result = train.fit(
    data=toy.data(), writers=[rows], options=train.Options(log_every=1),
    stages=[
      train.Stage('train', 3, again),
      train.Stage('other', 2, toy.build(ADAM)),
      train.Stage('retrain', 3, again),
    ],
  )  # fmt: skip
  assert counts == {'update': 1}
  assert [cost['stage'] for cost in result.costs] == ['train', 'other']
  plain = train.fit(toy.build(ADAM), toy.data(), steps=8)
  toy.assert_same(result.state, plain.state)


def test_a_wrong_entrance_is_named():
  wrong = lambda state, data: state
  with pytest.raises(ValueError, match="stage 'sgd': enter must return"):
    fit(stages=stages(first=1, enter=wrong))


def test_runs_enter_together():
  r = train.fit(
    data=toy.data(), stages=stages(2, 3, 1), runs=3,
    options=train.Options(log_every=1),
  )  # fmt: skip
  assert r.step == 6
  assert np.shape(r.metrics['loss']) == (3,)
  assert len(set(r.metrics['loss'])) == 3


@pytest.mark.parametrize('changed', ['shorter', 'fewer', 'renamed'])
def test_changed_stages_are_refused(tmp_path, changed):
  fit(tmp_path, 9)
  other = {
    'shorter': stages(first=10),
    'fewer': stages()[:1],
    'renamed': [s._replace(name=s.name + '2') for s in stages()],
  }[changed]
  with pytest.raises(ValueError, match='stages'):
    fit(tmp_path, stages=other)


def test_build_and_stages_exclude_each_other():
  with pytest.raises(ValueError, match='stages bring their own build'):
    train.fit(toy.build(), toy.data(), steps=3, stages=stages())
