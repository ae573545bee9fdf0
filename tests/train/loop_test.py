"""The order of things in one run: reading, stopping, folding, refusing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tmlib import train
from tmlib.train import program
from tmlib.train.profile import profiled


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_one_trace_of_each_function(tmp_path, parallel):
  counts = {}
  options = train.Options(
    parallel=parallel, log_every=3, eval_every=4, save_every=10
  )
  # 21 held-out examples: the last batch of the pass is padded.
  result = train.fit(
    toy.counting(toy.build(), counts), toy.data(), steps=11, options=options,
    evaluations={'held_out': toy.held_out()}, workdir=tmp_path, writers=[],
  )  # fmt: skip
  assert counts == {'update': 1, 'evaluate': 1}
  (cost,) = result.costs
  assert cost['stage'] == 'main'
  assert cost['seconds'] > 0
  assert cost['flops'] > 0
  assert cost['argument_bytes'] > 0


def test_quick_compile_changes_rounding_at_most():
  fit = lambda **options: train.fit(
    toy.build(), toy.data(), steps=20, options=train.Options(**options)
  )
  quick, slow = fit(quick_compile=True), fit()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    quick.state.params, slow.state.params,
  )  # fmt: skip


def test_rows_come_when_they_are_due():
  rows = toy.Rows()
  options = train.Options(log_every=3, eval_every=4)
  train.fit(
    toy.build(), toy.data(), steps=11, options=options, writers=[rows],
    evaluations={'held_out': toy.held_out()},
  )  # fmt: skip
  assert list(rows.rows) == [3, 4, 6, 8, 9, 11]
  has = lambda name: [s for s, row in rows.rows.items() if name in row]
  assert has('loss') == [3, 6, 9, 11]
  assert has('held_out/mse') == [4, 8, 11]
  np.testing.assert_allclose(
    rows.column('progress/percent'), [100 * s / 11 for s in (3, 6, 9, 11)]
  )
  assert rows.rows[11]['progress/eta_seconds'] == 0
  assert rows.closed


def test_a_method_without_data():
  result = train.fit(toy.bandit, steps=20, seed=1)
  assert int(result.state['step']) == 20
  # Each duel adds +1/2 and -1/2, or nothing is added that does not cancel.
  np.testing.assert_allclose(result.state['wins'].sum(1), 0, atol=1e-6)
  assert np.abs(result.state['wins']).sum() > 0
  again = train.fit(
    toy.bandit, steps=20, seed=1,
    options=train.Options(parallel='pmap', steps_per_call=10, log_every=20),
  )  # fmt: skip
  toy.assert_same(again.state, result.state)


def test_folded_steps_report_the_last_of_them():
  rows, folded = toy.Rows(), toy.Rows()
  train.fit(toy.bandit, steps=8, options=train.Options(log_every=1),
            writers=[rows])  # fmt: skip
  train.fit(
    toy.bandit, steps=8, writers=[folded],
    options=train.Options(log_every=4, steps_per_call=4),
  )  # fmt: skip
  np.testing.assert_array_equal(
    folded.column('regret'), rows.column('regret')[3::4]
  )


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(steps_per_call=3), 'steps_per_call=3 does not divide steps of stage'),
    (dict(steps_per_call=4, log_every=6), 'does not divide log_every = 6'),
    (dict(steps_per_call=4, save_every=2), 'does not divide save_every = 2'),
    (dict(steps_per_call=4, eval_every=6), 'does not divide eval_every = 6'),
    (dict(steps_per_call=0), 'steps_per_call must be at least 1'),
    (dict(max_in_flight=0), 'max_in_flight must be at least 1'),
    (dict(save_every=-1), 'save_every must be at least 0'),
    (dict(parallel='shard'), "'jit' or 'pmap', got 'shard'"),
    (dict(mesh=(1, 3, 1)), 'does not use the 4 devices'),
    (dict(mesh=(1, 4)), 'mesh must be'),
    (dict(profile=(5, 2)), 'profile must be'),
    (dict(rules=(('w', 'fdsp:data'),)), "unknown sharding action 'fdsp:data'"),
  ],
)
def test_options_that_do_not_fit(change, message):
  options = train.Options(**({'log_every': 4} | change))
  with pytest.raises(ValueError, match=message):
    train.fit(toy.build(), toy.data(), steps=20, options=options)


def test_arguments_that_do_not_fit():
  with pytest.raises(ValueError, match='batch_size 6 is not a multiple'):
    train.fit(toy.build(), toy.data(6), steps=2)
  with pytest.raises(ValueError, match='give build and steps, or stages'):
    train.fit(toy.build())
  with pytest.raises(ValueError, match="'held_out' is endless"):
    train.fit(
      toy.build(), toy.data(), steps=2, evaluations={'held_out': toy.data()}
    )
  data = train.run_data(toy.arrays(), np.ones((2, toy.N)), 8)
  with pytest.raises(ValueError, match='the data are per run, but runs = 0'):
    train.fit(toy.build(), data, steps=2)
  with pytest.raises(ValueError, match='batches for 2 runs, but runs = 3'):
    train.fit(toy.build(), data, steps=2, runs=3)


@pytest.mark.parametrize(
  ('update', 'message'),
  [
    (lambda s, b: ({'step': s['step']}, {}), r"state\['x'\]: .* -> absent"),
    (lambda s, b: (s | {'x': s['x'][None]}, {}), r"state\['x'\]: .*\(1,\)"),
    (lambda s, b: (s | {'step': s['x']}, {}), r"state\['step'\].*float32"),
    (lambda s, b: (s, {'gap': jnp.ones(2)}), r"metric 'gap' has shape \(2,\)"),
    (lambda s, b: (s, {'p': (s['x'], jnp.ones(1))}), "metric 'p' has shape"),
  ],
)
def test_an_update_is_held_to_the_contract_before_it_is_compiled(
  update, message
):
  with pytest.raises(ValueError, match=message):
    train.fit(toy.scalar_method(update), steps=2)


def _method(**changes):
  update = lambda state, batch: (state, {})
  return toy.scalar_method(update)(None)._replace(**changes)


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (_method(), 'got a Method; pass lambda axis_name: method'),
    (3, r'build must be a function axis name -> Method, got a int'),
    (
      lambda axis: toy.build(),
      r'build\(None\) must .* got a function; if it is',
    ),
    (lambda axis: tuple(_method()), 'got a tuple; return tmlib.train.Method'),
    (
      lambda axis: _method(update=lambda s, b: s),
      r'update must return the pair \(state, metrics\), got a dict',
    ),
    (
      lambda axis: _method(update=lambda s, b: (s, s['x'])),
      'must return its metrics as a dict, got a .*Tracer',
    ),
  ],
)
def test_a_wrong_method_is_named_before_it_is_compiled(build, message):
  with pytest.raises(TypeError, match=message):
    train.fit(build, steps=2)


@pytest.mark.parametrize(
  ('found', 'error', 'message'),
  [
    ({'outputs': {}}, TypeError, r"sums missing or no dict, got \['outputs'\]"),
    ({'loss': 1.0}, TypeError, r"sums and outputs missing .* got \['loss'\]"),
    (1.0, TypeError, 'got a float'),
    (
      {'sums': {'mse': jnp.ones(())}, 'outputs': {}},
      ValueError,
      r"sums\['mse'\] must be a pair \(sum, weight\)",
    ),
    (
      {'sums': {'mse': (jnp.ones(3), jnp.ones(3))}, 'outputs': {}},
      ValueError,
      r'of scalars, got \(\(3,\), \(3,\)\)',
    ),
  ],
)
def test_a_wrong_evaluation_is_named(found, error, message):
  build = lambda axis: _method(evaluate=lambda state, batch: found)
  with pytest.raises(error, match=message):
    train.fit(build, steps=1, evaluations={'held_out': toy.held_out()})


def halving(state, batch):
  del batch
  step, x = state['step'] + 1, state['x'] / 2
  return {'step': step, 'x': x}, {'gap': x}


def test_stop_ends_and_stays_ended(tmp_path):
  def fit(tolerance, rows=None):
    return train.fit(
      toy.scalar_method(halving), steps=40, workdir=tmp_path,
      options=train.Options(log_every=2), writers=[rows or toy.Rows()],
      stop=lambda metrics: metrics['gap'] < tolerance,
    )  # fmt: skip

  first = fit(0.01)
  assert (first.status, first.step) == ('stopped', 8)  # 2^-8, read in twos
  rows = toy.Rows()
  again = fit(0.01, rows)
  assert (again.status, again.step, again.metrics) == (
    'stopped', 8, {'gap': 2**-8},
  )  # fmt: skip
  assert not rows.rows
  further = fit(1e-3)
  assert (further.status, further.step) == ('stopped', 10)


def test_a_finished_run_is_evaluated_again_and_can_be_extended(tmp_path):
  def fit(steps):
    rows = toy.Rows()
    result = train.fit(
      toy.build(), toy.data(), steps=steps, workdir=tmp_path, writers=[rows],
      evaluations={'held_out': toy.held_out()},
    )  # fmt: skip
    return result, rows

  first, _ = fit(6)
  again, rows = fit(6)
  assert not rows.rows
  assert again.metrics == first.metrics
  toy.assert_same(
    again.evaluations['held_out'][0].outputs,
    first.evaluations['held_out'][0].outputs,
  )
  longer, rows = fit(9)
  assert longer.step == 9
  assert list(rows.rows) == [9]
  with pytest.raises(ValueError, match='steps=6, but the run found has done 9'):
    fit(6)


def test_steps_per_call_must_fit_the_checkpoint(tmp_path):
  run = lambda steps, folds: train.fit(
    toy.bandit, steps=steps, workdir=tmp_path, writers=[],
    options=train.Options(log_every=10, steps_per_call=folds),
  )  # fmt: skip
  run(15, 1)
  with pytest.raises(ValueError, match='=10 does not divide the step 15'):
    run(20, 10)
  assert run(20, 5).step == 20


def test_at_most_so_many_calls_are_in_flight(monkeypatch):
  for bound in (1, 2, 3):
    events = []
    step, wait = program.Program.step, jax.block_until_ready

    def dispatch(self, state, loaded, step=step, events=events):
      events.append(1)
      return step(self, state, loaded)

    def block(x, wait=wait, events=events):
      events.append(-1)
      return wait(x)

    with monkeypatch.context() as patch:
      patch.setattr(program.Program, 'step', dispatch)
      patch.setattr(jax, 'block_until_ready', block)
      train.fit(
        toy.bandit, steps=30,
        options=train.Options(log_every=30, max_in_flight=bound),
      )  # fmt: skip
    flying = np.cumsum(events)
    # One more is dispatched, then the oldest is waited for.
    assert flying.max() == bound + 1
    assert flying[-2] == bound


def test_float64_reaches_the_step_through_the_prefetch_thread():
  with jax.enable_x64(True):
    arrays = {'x': np.full((8, 1), 1 + 1e-12), 'y': np.zeros(8)}
    seen = []

    def loss(params, batch, key, step):
      seen.append(batch['x'].dtype)
      total = jnp.sum(batch['x'][:, 0] * params['a'] * batch['weight'])
      return total, batch['weight'].sum(), {}

    build = train.gradient_method(
      lambda key, batch: {'a': jnp.ones((), jnp.float64)}, loss,
      lambda params, batch: {'sums': {}, 'outputs': {}}, optax.sgd(1.0),
    )  # fmt: skip
    result = train.fit(build, train.array_data(arrays, 4), steps=1)
    assert set(seen) == {jnp.dtype('float64')}
    np.testing.assert_allclose(
      float(result.state.params['a']), -1e-12, rtol=1e-3
    )
  assert not jax.config.jax_enable_x64


def test_nothing_is_caught_or_kept_without_a_workdir(tmp_path, monkeypatch):
  import signal

  monkeypatch.chdir(tmp_path)
  before = signal.getsignal(signal.SIGTERM)
  during = []
  stop = lambda metrics: during.append(signal.getsignal(signal.SIGTERM))
  options = train.Options(log_every=1)
  train.fit(toy.bandit, steps=1, options=options, stop=stop)
  train.fit(toy.bandit, steps=1, options=options, stop=stop, workdir='run')
  assert during[0] is before
  assert during[1] is not before
  assert signal.getsignal(signal.SIGTERM) is before
  assert [p.name for p in tmp_path.iterdir()] == ['run']


def test_a_state_may_keep_arrays_of_its_data():
  """The step donates its state, and must not delete the data with it."""
  data = train.Data(
    load=lambda step, rows: {'index': np.arange(8)[rows]},
    batch_size=8,
    fingerprint={},
    resident={'x': np.arange(8.0, dtype=np.float32)},
    gather=lambda resident, batch: resident,
  )

  def build(axis_name):
    del axis_name
    init = lambda key, batch: {'first': batch['x'], 'again': batch['x']}
    update = lambda state, batch: (
      {'first': state['first'] + batch['x'], 'again': state['again']},
      {},
    )
    return train.Method(init, update, lambda state, batch: {})

  result = train.fit(build, data, steps=3)
  np.testing.assert_array_equal(result.state['first'], 4 * np.arange(8))
  np.testing.assert_array_equal(result.state['again'], np.arange(8))


def test_the_profile_window_covers_whole_calls(tmp_path, monkeypatch):
  events = []
  monkeypatch.setattr(
    jax.profiler, 'start_trace', lambda path: events.append(path)
  )
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: events.append('end'))
  with profiled((3, 5), tmp_path) as at:
    for step in (0, 2, 4, 6):
      at(step, 2)
      events.append(step)
  profile = str(tmp_path / 'profile')
  assert events == [0, profile, 2, 4, 'end', 6]
