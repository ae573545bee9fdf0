"""README, licence, citation and notebooks say what is so."""

import ast
import json
import pathlib
import re
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
NOTEBOOKS = sorted((ROOT / 'colabs').glob('*.ipynb'))


def version():
  text = (ROOT / 'tmlib' / '_version.py').read_text(encoding='utf-8')
  return re.search(r"__version__ = '(.+)'", text).group(1)


def commands(text):
  """The lines of all fenced bash blocks, folded lines joined."""
  blocks = re.findall(r'```(?:bash|sh)\n(.*?)```', text, re.DOTALL)
  for block in blocks:
    for line in re.sub(r'\\\n\s*', '', block).splitlines():
      if line.strip() and not line.lstrip().startswith('#'):
        yield line.strip()


def test_readme_has_a_readable_length():
  assert 80 <= len(README.splitlines()) <= 180


def test_readme_paths_exist():
  links = re.findall(r'\]\(([^)#]+)', README)
  local = [x for x in links if not re.match(r'[a-z]+:', x)]
  quoted = re.findall(
    r'`((?:tmlib|kernels_pallas|experiments|configs|colabs|tests|\.ci)/'
    r'[\w./-]+)`',
    README,
  )
  missing = [x for x in [*local, *quoted] if not (ROOT / x).exists()]
  assert not missing


def test_readme_modules_exist():
  names = set(re.findall(r'`((?:tmlib|kernels_pallas)(?:\.\w+)+)`', README))
  for name in names:
    parts = name.split('.')
    found = any(
      (ROOT.joinpath(*parts[:n])).is_dir()
      or ROOT.joinpath(*parts[:n]).with_suffix('.py').is_file()
      for n in (len(parts), len(parts) - 1)
      if n > 1
    )
    assert found, name


def test_readme_commands_name_real_files_flags_and_extras():
  lines = list(commands(README))
  assert lines
  setup = (ROOT / 'setup.py').read_text(encoding='utf-8')
  flags = ''.join(
    path.read_text(encoding='utf-8')
    for path in sorted((ROOT / 'experiments').rglob('*.py'))
  )
  for line in lines:
    for script in re.findall(r'\b(?:experiments|\.ci)/[\w/.]+', line):
      assert (ROOT / script).is_file(), line
    for config in re.findall(r'--config=(\S+?\.py)', line):
      assert (ROOT / config).is_file(), line
    for extra in re.findall(r"'\.?\w*\[([\w,]+)\]'", line):
      for name in extra.split(','):
        assert f"'{name}':" in setup, line
    if 'experiments/' not in line:
      continue
    for flag in re.findall(r'\s--(\w+)[=\s]', line + ' '):
      assert f"'{flag}'" in flags or f"'--{flag}'" in flags, (flag, line)


def test_ci_runs_the_test_command_of_the_readme():
  line = next(x for x in commands(README) if x.endswith('-m pytest -n 2'))
  assert 'venv' in line
  assert '.[test]' in line
  assert (ROOT / '.ci' / 'run').stat().st_mode & 0o111


def test_readme_example_prints_what_it_says(capsys, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  blocks = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
  assert blocks
  for block in blocks:
    wanted = re.findall(r'^print\(.*\)\s+# (.*)$', block, re.MULTILINE)
    ast.parse(block)
    exec(compile(block, 'README.md', 'exec'), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == wanted


def test_licence_is_apache():
  text = (ROOT / 'LICENSE').read_text(encoding='utf-8')
  assert 'Apache License' in text
  assert 'Version 2.0, January 2004' in text
  assert 'END OF TERMS AND CONDITIONS' in text


def test_citation_is_complete_and_up_to_date():
  cff = yaml.safe_load((ROOT / 'CITATION.cff').read_text(encoding='utf-8'))
  assert {'cff-version', 'title', 'message', 'authors'} <= set(cff)
  assert cff['version'] == version()
  assert cff['license'] == 'Apache-2.0'


def test_changelog_speaks_of_this_version_or_of_unreleased_work():
  text = (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8')
  assert re.search(rf'^## \[(Unreleased|{re.escape(version())})\]', text, re.M)


def cells(path, kind=None):
  notebook = json.loads(path.read_text(encoding='utf-8'))
  for cell in notebook['cells']:
    if kind in (None, cell['cell_type']):
      yield cell


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_clean(path):
  assert path.stat().st_size < 100_000
  notebook = json.loads(path.read_text(encoding='utf-8'))
  assert notebook['metadata']['kernelspec']['name'] == 'python3'
  first = ''.join(notebook['cells'][0]['source'])
  assert first.startswith('# ')
  badge = re.search(r'colab\.research\.google\.com/github/[^)\s]+', first)
  assert badge, 'no badge in the first cell'
  assert badge.group().endswith(f'/blob/main/colabs/{path.name}')
  for cell in cells(path, 'code'):
    assert cell['outputs'] == []
    assert cell['execution_count'] is None
  source = '\n'.join(''.join(c['source']) for c in cells(path, 'code'))
  assert 'jax.config.update' not in source
  assert 'assert ' in source, 'a notebook ends by asserting its claim'


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_installs_only_where_it_must(path):
  install = ''.join(next(cells(path, 'code'))['source'])
  assert 'pip install' in install
  assert 'except ImportError' in install or 'except ModuleNotFound' in install
  # Colab's own jax stays as it is.
  assert not re.search(r'pip install[^\n]*(-U\b|--upgrade|jax\[)', install)


@pytest.mark.notebook
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
  import nbclient
  import nbformat

  monkeypatch.setenv('TMLIB_FAST', '1')
  monkeypatch.setenv('MPLBACKEND', 'agg')
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(
    notebook,
    timeout=300,
    kernel_name='python3',
    resources={'metadata': {'path': str(tmp_path)}},
  )
  client.execute()


def test_notebook_kernel_is_this_interpreter():
  # `python3` is ipykernel's default spec, which starts sys.executable.
  assert sys.version_info >= (3, 11)
