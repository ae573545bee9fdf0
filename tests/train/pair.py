"""One of two processes: python -m tests.train.pair SCENARIO WORKDIR [ARGS]."""

import os
import pathlib
import sys

import jax

from tests.train import toy, worker
from tmlib import train

STEPS = 50


def fit(workdir=None, steps=STEPS, data=None, rows=None, **options):
  """The run whose numbers are compared between layouts."""
  return train.fit(
    toy.build(ema_decay=0.9),
    data or toy.data(),
    steps=steps,
    seed=3,
    evaluations={'held_out': toy.held_out()},
    options=train.Options(**({'log_every': 1} | options)),
    workdir=workdir,
    writers=[rows or toy.Rows()],
  )


def fit_runs(**options):
  """Three runs with a batch each, padded to the mesh."""
  weights = (toy.np.arange(toy.N)[None] % 3 != toy.np.arange(3)[:, None]) * 1.0
  return train.fit(
    toy.build(), train.run_data(toy.arrays(), weights, 8), steps=6, runs=3,
    evaluations={'all': train.pass_data(toy.arrays(), 8, run_weights=weights)},
    options=train.Options(log_every=2, **options),
  )  # fmt: skip


def numbers(workdir=None, steps=STEPS, **options):
  """What must not depend on the layout; all processes see it."""
  rows = toy.Rows()
  result = fit(workdir, steps, rows=rows, **options)
  found = result.evaluations['held_out'][0]
  return {
    'loss': rows.column('loss'), 'abs': rows.column('abs'),
    'mse': rows.column('held_out/mse'),
    'prediction': found.outputs['prediction'], 'id': found.outputs['id'],
    'params': result.state.params, 'ema': result.state.ema_params,
  }  # fmt: skip


def run_numbers(**options):
  """The same of runs."""
  result = fit_runs(**options)
  every = [one.outputs for one in result.evaluations['all']]
  return {'loss': toy.np.array(result.metrics['loss']), 'every': every}


def save(workdir, name, tree):
  if jax.process_index() == 0:
    toy.np.savez(pathlib.Path(workdir, name), **toy.flat(tree))


def agree(workdir):
  """All comparisons of one pair of processes."""
  for parallel in ('jit', 'pmap'):
    save(workdir, parallel, numbers(parallel=parallel))
  # What one process began ends here, and the other way round.
  save(workdir, 'ended', numbers(f'{workdir}/begun_by_one', parallel='pmap'))
  numbers(f'{workdir}/begun_by_two', steps=20)
  numbers(f'{workdir}/stopped', steps=20)
  save(workdir, 'resumed', numbers(f'{workdir}/stopped'))
  save(workdir, 'runs', run_numbers(mesh=(2, 2, 1), parallel='pmap'))


def interrupted(workdir):
  """Runs until one of the two is told to stop."""
  data = worker.slowly(toy.data(), 0.02)
  result = train.fit(
    toy.build(), data, steps=worker.STEPS, seed=worker.SEED,
    options=train.Options(
      log_every=8, save_every=8, steps_per_call=4, parallel='pmap'
    ),
    workdir=workdir,
  )  # fmt: skip
  worker.say(status=result.status, step=result.step)


def main(scenario, *arguments):
  from experiments import cli

  cli.connect()
  globals()[scenario](*arguments)
  jax.distributed.shutdown()


if __name__ == '__main__':
  assert os.environ['JAX_NUM_PROCESSES'] == '2'
  main(*sys.argv[1:])
