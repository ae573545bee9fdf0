"""What the process tests run: python -m tests.train.worker SCENARIO WORKDIR."""

import json
import os
import pathlib
import resource
import sys
import time

import jax
import jax.numpy as jnp

from tests.train import toy
from tmlib import train

STEPS = 100_000  # more than any test waits for
SEED = 5


def say(**found):
  sys.stdout.write(json.dumps(found) + '\n')
  sys.stdout.flush()


def slowly(data, seconds=0.01, at=None, action=None):
  """The stream, each batch late; before the batch `at` comes `action`."""

  def load(step, rows):
    time.sleep(seconds)
    if step == at:
      action()
    return data.load(step, rows)

  return data._replace(load=load)


def fit(workdir, *, steps=STEPS, data=None, every=5, **options):
  """The run of the process tests, in whatever process."""
  return train.fit(
    toy.build(),
    data or toy.data(),
    steps=steps,
    seed=SEED,
    evaluations={'held_out': toy.held_out()},
    options=train.Options(log_every=every, save_every=every, **options),
    workdir=workdir,
  )


def interrupted(workdir, cache=''):
  """Runs until a signal comes."""
  events = []
  jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
  data = slowly(toy.data())
  result = fit(workdir, data=data, compilation_cache=cache, profile=(2, 4))
  hits = events.count('/jax/compilation_cache/cache_hits')
  misses = events.count('/jax/compilation_cache/cache_misses')
  say(status=result.status, step=result.step, hits=hits, misses=misses)


def stuck(workdir):
  """A batch that does not come: only a second signal helps."""
  mark = pathlib.Path(workdir, 'stuck')

  def hang():
    mark.touch()
    time.sleep(600)

  fit(workdir, data=slowly(toy.data(), at=7, action=hang))


def stuck_save(workdir):
  """The second checkpoint is written but never committed."""
  rename = os.rename

  def never(source, target, *args, **kwargs):
    if pathlib.Path(target).name == '10':
      time.sleep(600)
    return rename(source, target, *args, **kwargs)

  os.rename = os.replace = never
  fit(workdir, data=slowly(toy.data()))


def saving(workdir):
  """Saves all the time, until it is killed."""
  fit(workdir, every=1)


def ballast(axis_name=None):
  """A method whose state fills a file."""
  del axis_name

  def init(key, batch):
    del batch
    words = jax.random.bits(key, (1 << 19,))  # two MiB that do not compress
    return {'words': words, 'step': jnp.zeros((), jnp.int32)}

  def update(state, batch):
    del batch
    step = state['step'] + 1
    return {'words': state['words'] ^ 1, 'step': step}, {'at': step * 1.0}

  return train.Method(init, update, lambda state, batch: {})


def full_disk(workdir, limit=True):
  """Once step 5 is saved, no file may grow beyond one MiB."""

  def stop(metrics):
    if limit and metrics['at'] == 10:
      while not pathlib.Path(workdir, 'checkpoints', '5').exists():
        time.sleep(0.01)
      resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    return False

  options = train.Options(log_every=5, save_every=5)
  result = train.fit(
    ballast, steps=40, options=options, workdir=workdir, stop=stop
  )
  say(status=result.status, step=result.step)


class Broken:
  """Items of which one cannot be read."""

  def __init__(self, mark):
    self.mark = mark
    self.arrays = toy.arrays()

  def __len__(self):
    return toy.N

  def __getitem__(self, i):
    if i == 30:
      self.mark.write_text(str(time.time()))
      raise OSError('slide_30.h5 is truncated')
    return {k: v[i] for k, v in self.arrays.items()} | {'id': i, 'weight': 1.0}


def broken(workdir):
  """An item in the fourth batch cannot be read."""
  import numpy as np

  def collate(items, bucket):
    del bucket
    batch = {k: np.stack([x[k] for x in items]) for k in items[0]}
    return batch | {'weight': batch['weight'].astype(np.float32)}

  source = Broken(pathlib.Path(workdir, 'raised'))
  data = train.source_data(source, collate, 8, shuffle=False, workers=2)
  fit(workdir, data=data)


def main(scenario, workdir, *arguments):
  pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
  globals()[scenario](workdir, *arguments)


if __name__ == '__main__':
  main(*sys.argv[1:])
