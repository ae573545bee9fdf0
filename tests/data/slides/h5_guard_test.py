import functools
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from tests.data.slides.support import (
  features_of,
  grid_coords,
  write_clam,
  write_csv,
  write_trident,
)
from tmlib.data.slides import (
  check_cohort,
  h5_guard,
  join_slides,
  read_labels,
  scan_slides,
)
from tmlib.data.slides import scan as scan_module
from tmlib.data.slides.cohort import CohortError
from tmlib.data.slides.h5 import load_h5
from tmlib.data.slides.h5_guard import H5Guard
from tmlib.data.slides.slide import SlideFileError

# Ends as libhdf5 does, where a file's name says so.
PROGRAM = """
import json, os, signal, sys, time
print('ready', flush=True)
for line in sys.stdin:
  path, full, seconds = json.loads(line)
  if 'segfault' in path:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
  if 'exit' in path:
    os._exit(7)
  if 'hang' in path:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    time.sleep(60)
  print('done', flush=True)
"""


@pytest.fixture(name='dying')
def dying_fixture(tmp_path):
  program = tmp_path / 'program.py'
  program.write_text(PROGRAM)
  return functools.partial(H5Guard, 1.0, program)


def test_every_file_that_kills_its_reader_is_named(
  tmp_path, monkeypatch, dying
):
  monkeypatch.setattr(scan_module, 'H5Guard', dying)
  names = ['a', 'exit 1', 'b', 'segfault', 'hang', 'exit 2', 'c']
  for name in names:
    write_clam(tmp_path / f'{name}.h5', features_of(6), grid_coords(2, 3))
  (tmp_path / 'broken.h5').write_bytes(b'no HDF5')
  files = {n: tmp_path / f'{n}.h5' for n in [*names, 'broken']}
  scan = scan_slides(list(files.values()))
  errors = {n: scan[path].error for n, path in files.items()}
  assert [n for n in names if not errors[n]] == ['a', 'b', 'c']
  assert scan[files['c']].num_patches == 6
  for name, how in [
    ('exit 1', 'crashed (exit status 7)'),
    ('exit 2', 'crashed (exit status 7)'),
    ('segfault', 'crashed (SIGSEGV)'),
    ('hang', 'did not return in 1 s'),
  ]:
    assert errors[name] == (
      f'{files[name]} is damaged: the HDF5 library {how} while reading it; '
      'copy or extract it again'
    )
  assert 'no readable HDF5' in errors['broken']
  # All of them at the start of a run.
  table = write_csv(
    tmp_path / 'labels.csv',
    'slide_id,label',
    [(name, i % 2) for i, name in enumerate(files)],
  )
  cohort = join_slides(read_labels(table), files)
  with pytest.raises(CohortError) as error:
    check_cohort(cohort, scan)
  for name in ('exit 1', 'exit 2', 'segfault', 'hang', 'broken'):
    assert f'{name}.h5' in str(error.value)


def test_a_heap_that_sends_the_library_round_for_ever(tmp_path):
  path = tmp_path / 'a.h5'
  write_trident(path, features_of(6), grid_coords(2, 3), patch_size=256)
  good = path.read_bytes()
  heap = good.index(b'GCOL')
  bad = bytearray(good)
  bad[heap + 24] = 0  # size of its first object
  with H5Guard(1.0) as guard:
    assert guard.check(path) == ''
    path.write_bytes(bad)
    error = guard.check(path)
    # Other releases of the library may see it.
    assert not error or 'a.h5 is damaged' in error
    path.write_bytes(good)
    assert guard.check(path) == ''


def test_it_reads_what_the_reader_does(tmp_path):
  path = tmp_path / 'a.h5'
  with h5py.File(path, 'w') as file:
    file.create_dataset('features', (2**31, 1024), 'f4', chunks=(64, 1024))
    file['coords'] = grid_coords(2, 3)
  h5_guard.touch(str(path), True)  # terabytes are not asked for
  np.savez(tmp_path / 'b.h5', features=features_of(2))
  with H5Guard() as guard:
    for name in ('a.h5', 'b.h5', 'none.h5', 'odd "\n\udce9.h5'):
      assert guard.check(tmp_path / name) == ''


def test_no_child_and_no_library(tmp_path, caplog, monkeypatch):
  path = tmp_path / 'a.h5'
  write_clam(path, features_of(6), grid_coords(2, 3))
  program = tmp_path / 'program.py'
  program.write_text('raise SystemExit(3)')
  with H5Guard(1.0, program) as guard:
    assert guard.check(path) == guard.check(path) == ''
  assert caplog.text.count('exit status 3') == 1
  monkeypatch.setattr(sys, 'executable', os.fspath(tmp_path / 'no python'))
  with H5Guard() as guard:
    assert guard.check(path) == ''
  assert 'may crash this process' in caplog.text


def test_the_child_imports_no_jax():
  code = (
    'import runpy, sys, io\n'
    'sys.stdin = io.TextIOWrapper(io.BytesIO())\n'
    f'runpy.run_path({h5_guard.__file__!r}, run_name="__main__")\n'
    'print({"jax", "tmlib"} & set(sys.modules))\n'
  )
  found = subprocess.run(
    [sys.executable, '-P', '-c', code],
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  assert (found.stdout + found.stderr).split() == ['ready', 'set()']


def test_what_others_print_is_no_answer(tmp_path, monkeypatch):
  (tmp_path / 'sitecustomize.py').write_text("print('hello', flush=True)")
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  write_clam(tmp_path / 'a.h5', features_of(6), grid_coords(2, 3))
  with H5Guard() as guard:
    assert guard.check(tmp_path / 'a.h5') == ''
  loud = tmp_path / 'ends.py'
  loud.write_text('print("no")')
  with H5Guard(program=loud) as guard:
    assert guard.check(tmp_path / 'a.h5') == ''  # unguarded, with a warning


def test_a_header_that_asks_for_too_much(tmp_path):
  """Of positions too; the child reads all attributes all the same."""
  path = tmp_path / 'a.h5'
  with h5py.File(path, 'w') as file:
    file['features'] = features_of(6)
    coords = file.create_dataset('coords', (5_000_000, 2), 'i8', chunks=True)
    coords.attrs['patch_size'] = 256
  with pytest.raises(SlideFileError, match=r'coords of shape \(5000000, 2\)'):
    load_h5(path)
  seen = []
  with pytest.MonkeyPatch.context() as patch:
    items = h5py.AttributeManager.items
    patch.setattr(
      h5py.AttributeManager, 'items', lambda a: seen.append(1) or items(a)
    )
    h5_guard.touch(str(path), True)
  assert len(seen) == 3  # of the file, features and positions
