"""What the code imports is what setup.py asks for."""

import ast
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OURS = {'tmlib', 'kernels_pallas', 'experiments', 'configs', 'tests'}
# Names that a package is installed by, where they differ from the import.
INSTALLED_AS = {
  'PIL': 'pillow',
  'absl': 'absl-py',
  'orbax': 'orbax-checkpoint',
  'skimage': 'scikit-image',
  'sklearn': 'scikit-learn',
  'yaml': 'pyyaml',
  # Comes with every jax.
  'ml_dtypes': 'jax',
}
# Measured and tested against, never needed: their users say how to get them.
PEERS = {'duelpy', 'recbole', 'sksurv', 'torch', 'torchmil'}


def bare(requirement):
  return re.match(r'[\w.-]+', requirement).group().lower().replace('_', '-')


def setup_lists():
  """(install_requires, the union of all extras), as bare names."""
  tree = ast.parse((ROOT / 'setup.py').read_text(encoding='utf-8'))
  lists = [n for n in ast.walk(tree) if isinstance(n, ast.List)]
  call = next(
    node
    for node in ast.walk(tree)
    if isinstance(node, ast.keyword) and node.arg == 'install_requires'
  )
  required = {bare(x) for x in ast.literal_eval(call.value)}
  # Every other list of setup.py that reads like requirements is an extra.
  words = {
    bare(item.value)
    for found in lists
    for item in found.elts
    if isinstance(item, ast.Constant) and re.match(r'[\w.-]+', item.value)
  }
  return required, words


def imported(path, top):
  """Third-party packages that a file imports: at its top, or anywhere."""
  tree = ast.parse(path.read_text(encoding='utf-8'))
  for node in tree.body if top else ast.walk(tree):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
      names = [node.module or '']
    for name in names:
      first = name.split('.')[0]
      if first not in OURS and first not in sys.stdlib_module_names:
        yield INSTALLED_AS.get(first, first).lower().replace('_', '-')


def files(*folders):
  return [
    p for folder in folders for p in sorted((ROOT / folder).rglob('*.py'))
  ]


def test_the_library_loads_with_what_it_requires():
  required, _ = setup_lists()
  for path in files('tmlib', 'kernels_pallas'):
    assert set(imported(path, top=True)) <= required, path


@pytest.mark.parametrize('folder', ['tmlib', 'experiments', 'configs', 'tests'])
def test_everything_else_is_in_an_extra(folder):
  required, extras = setup_lists()
  for path in files(folder):
    missing = set(imported(path, top=False)) - required - extras - PEERS
    assert not missing, path


def test_nothing_is_required_without_need():
  required, _ = setup_lists()
  # A report of an experiment is drawn wherever tmlib is installed.
  paths = files('tmlib', 'experiments')
  used = {name for path in paths for name in imported(path, top=False)}
  assert required <= used
