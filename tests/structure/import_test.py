"""What importing the library costs and changes, each in a fresh process."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def fresh(code):
  """Runs `code` in a new interpreter and returns the JSON that it prints."""
  result = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout)


def test_import_adds_little_time_to_jax_and_sets_no_flag():
  code = """
import json, time
import jax
before = dict(jax.config.values)
start = time.perf_counter()
import tmlib
seconds = time.perf_counter() - start
after = dict(jax.config.values)
changed = [k for k in after if repr(before.get(k)) != repr(after[k])]
print(json.dumps([seconds, changed]))
"""
  found = [fresh(code) for _ in range(2)]
  assert min(seconds for seconds, _ in found) < 0.3
  assert all(changed == [] for _, changed in found)


def families():
  folders = sorted((ROOT / 'tmlib').iterdir())
  inits = [p for p in folders if (p / '__init__.py').is_file()]
  return ['tmlib.' + p.name for p in inits] + ['kernels_pallas']


def test_no_package_sets_a_flag_or_starts_a_backend():
  code = f"""
import importlib, json
import jax
from jax._src import xla_bridge
before = dict(jax.config.values)
for name in {families()!r}:
  importlib.import_module(name)
after = dict(jax.config.values)
changed = [k for k in after if repr(before.get(k)) != repr(after[k])]
print(json.dumps([changed, xla_bridge.backends_are_initialized()]))
"""
  changed, started = fresh(code)
  assert changed == []
  # A backend at import would break jax.distributed.initialize.
  assert not started


def test_drawing_and_readers_are_loaded_only_where_used():
  code = f"""
import importlib, json, sys
for name in {families()!r}:
  importlib.import_module(name)
heavy = ['matplotlib.pyplot', 'sklearn', 'skimage', 'mil', 'tensorflow',
         'torch', 'h5py', 'PIL']
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
  assert fresh(code) == []


@pytest.mark.parametrize('module', ['configs', 'experiments.cli'])
def test_light_modules_stay_light(module):
  code = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from ml_collections import config_flags
if {module!r} == 'configs':
  from experiments import cli
  import pathlib
  for path in sorted(pathlib.Path('configs').glob('*.py')):
    if not path.stem.startswith('_'):
      cli.load_config(str(path))
else:
  import experiments.cli
print(json.dumps([m for m in ('jax', 'flax', 'scipy') if m in sys.modules]))
"""
  assert fresh(code) == []
