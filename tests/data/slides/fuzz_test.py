"""Damaged files are answered by a named error, or read as what they hold."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.slides import pt_test
from tests.data.slides.support import (
  features_of,
  grid_coords,
  write_trident,
)
from tmlib.data.slides import (
  SlideFileError,
  TableError,
  read_header,
  read_labels,
  read_slide,
  read_splits,
  read_survival,
)
from tmlib.data.slides.h5_guard import H5Guard

TABLE = b"""case_id,slide_id,label,survival_months,censorship,train,val
p0,s0.svs,LUAD,10.5,1,s0,s1
p1,"s,1.svs",LUSC,3,0,s2,
"""


def originals(folder):
  write_trident(
    folder / 'a.h5', features_of(40, 8), grid_coords(5, 8),
    patch_size=256, patch_size_level0=256, overlap=0,
  )  # fmt: skip
  pt_test.unpack(folder / 'legacy.pt', pt_test.LEGACY)
  pt_test.unpack(folder / 'zip.pt', pt_test.ZIP)
  np.savez(folder / 'a.npz', features=features_of(9), coords=grid_coords(3, 3))
  np.save(folder / 'a.npy', features_of(9))
  (folder / 'a.csv').write_bytes(TABLE)
  return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(name='files', scope='module')
def files_fixture(tmp_path_factory):
  return originals(tmp_path_factory.mktemp('original'))


@st.composite
def damages(draw):
  """Bytes to change at relative positions, and where to cut."""
  flips = draw(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=6)
  )
  # Headers are where damage does harm.
  if draw(st.booleans()):
    flips = [(place * 0.1, mask) for place, mask in flips]
  return flips, draw(st.one_of(st.just(1.0), st.floats(0, 1)))


def damaged(raw, damage):
  flips, cut = damage
  raw = bytearray(raw)
  for place, mask in flips:
    if raw:
      raw[int(place * (len(raw) - 1))] ^= mask
  return bytes(raw[: int(np.ceil(cut * len(raw)))])


def answered(read, path, kind):
  """Reads, or raises `kind` with the name of the file."""
  message = path.name
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    try:
      read(path)
    except kind as error:
      message = str(error)
  assert path.name in message


# The same files every time: rare damage crashes libhdf5 or sends it round for
# ever, which no reader in its process can answer, and what a child process
# survives may yet depend on its memory.
FUZZ = settings(
  deadline=None,
  derandomize=True,
  max_examples=40,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(name='guard', scope='module')
def guard_fixture():
  with H5Guard(5.0) as guard:
    yield guard


@pytest.mark.parametrize(
  'name', ['a.h5', 'legacy.pt', 'zip.pt', 'a.npz', 'a.npy']
)
@FUZZ
@given(damage=damages())
def test_feature_files(files, tmp_path, guard, name, damage):
  path = tmp_path / name
  path.write_bytes(damaged(files[name], damage))
  if path.suffix == '.h5' and (error := guard.check(path)):
    assert error.startswith(f'{path} is damaged')
    return
  for read in (read_slide, read_header):
    answered(read, path, SlideFileError)


@FUZZ
@given(damage=damages())
def test_tables(files, tmp_path, damage):
  path = tmp_path / 'a.csv'
  path.write_bytes(damaged(files['a.csv'], damage))
  for read in (read_labels, read_survival, read_splits):
    answered(read, path, TableError)


@FUZZ
@given(text=st.text(alphabet='case_idslabel,;"\'\n\r\t 01.-é', max_size=80))
def test_any_text(tmp_path, text):
  path = tmp_path / 'a.csv'
  path.write_text(text, newline='')
  for read in (read_labels, read_survival, read_splits):
    answered(read, path, TableError)
