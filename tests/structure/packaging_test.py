"""The wheel and the source archive hold the library and nothing else."""

import pathlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

# Older ones need the package `wheel` and know no licence expressions.
pytest.importorskip('setuptools', '77')

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command, cwd):
  result = subprocess.run(
    [str(word) for word in command],
    cwd=cwd,
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


@pytest.fixture(name='tree', scope='module')
def tree_fixture(tmp_path_factory):
  """A copy of the files that git knows: a build leaves no trace in ours."""
  target = tmp_path_factory.mktemp('tree')
  listed = run(
    'git', 'ls-files', '--cached', '--others', '--exclude-standard', cwd=ROOT
  ).splitlines()
  for name in listed:
    source = ROOT / name
    if source.is_file():
      copy = target / name
      copy.parent.mkdir(parents=True, exist_ok=True)
      copy.write_bytes(source.read_bytes())
  return target


@pytest.fixture(name='archives', scope='module')
def archives_fixture(tree):
  # The backend itself, so that no build front end needs the network.
  code = (
    'from setuptools import build_meta as b; '
    'print("\\n" + b.build_wheel("dist") + "\\n" + b.build_sdist("dist"))'
  )
  names = run(sys.executable, '-c', code, cwd=tree).splitlines()[-2:]
  return [tree / 'dist' / name for name in names]


def test_wheel_holds_the_library_and_nothing_else(archives):
  with zipfile.ZipFile(archives[0]) as wheel:
    names = wheel.namelist()
    metadata = next(n for n in names if n.endswith('.dist-info/METADATA'))
    text = wheel.read(metadata).decode()
  assert {
    'tmlib/py.typed',
    'kernels_pallas/py.typed',
    'kernels_pallas/tuning/blocks.json',
  } <= set(names)
  folders = {name.split('/')[0] for name in names}
  extra = {f for f in folders if not f.endswith('.dist-info')}
  assert extra == {'tmlib', 'kernels_pallas'}
  modules = {
    str(path.relative_to(ROOT))
    for folder in extra
    for path in (ROOT / folder).rglob('*.py')
  }
  assert modules <= set(names)
  assert 'Requires-Python: >=3.11' in text
  assert any(name.endswith('LICENSE') for name in names)


def test_requirements_have_floors_only(archives):
  with zipfile.ZipFile(archives[0]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith('METADATA'))
    text = wheel.read(name).decode()
  needs = re.findall(r'^Requires-Dist: (.*)$', text, re.MULTILINE)
  assert needs
  assert not [need for need in needs if re.search(r'[<~]|==\d|!=', need)]


def test_source_archive_builds_the_same_version(archives):
  with tarfile.open(archives[1]) as archive:
    names = archive.getnames()
  base = names[0].split('/')[0]
  wanted = ('setup.py', 'README.md', 'tmlib/py.typed', 'tmlib/_version.py')
  assert {f'{base}/{name}' for name in wanted} <= set(names)
  assert archives[0].name.split('-')[1] == base.split('-')[1]


@pytest.mark.slow
def test_wheel_installs_and_imports_in_a_clean_environment(archives, tmp_path):
  venv.create(tmp_path / 'venv', with_pip=True)
  python = tmp_path / 'venv' / 'bin' / 'python'
  run(python, '-m', 'pip', 'install', '-q', archives[0], cwd=tmp_path)
  modules = sorted(
    str(path.parent.relative_to(ROOT)).replace('/', '.')
    for folder in ('tmlib', 'kernels_pallas')
    for path in (ROOT / folder).rglob('__init__.py')
  )
  code = (
    f'import importlib; [importlib.import_module(m) for m in {modules!r}]; '
    'import tmlib, sys; print(tmlib.__version__); '
    'assert "tensorflow" not in sys.modules'
  )
  # Not from the checkout: it must be the installed one.
  version = run(python, '-c', code, cwd=tmp_path).strip()
  assert version == archives[0].name.split('-')[1]
