"""The arrows, sizes and names of the house, read from the source by ast."""

import ast
import functools
import importlib
import pathlib
import sys
import typing

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ('tmlib', 'kernels_pallas')
CODE = (*LIBRARY, 'experiments', 'configs')

# Lower numbers may not import higher ones; equal numbers only themselves.
SHARED = {'ops': 1, 'nn': 2, 'data': 2, 'train': 2}
# A family that is built on another one, and why.
BUILT_ON = {
  # TMEvolve is a model of bags: it fills mil's Bag in and mil's output out.
  ('reaction_diffusion', 'mil'),
  # A user's interests are the experts of a sparse mixture.
  ('recsys', 'moe'),
  # The users of a market are a population.
  ('market', 'mean_field'),
  # The MIL benchmark compares its models with TMEvolve.
}
# What a file of each ground may import beyond the standard library.
KERNEL_IMPORTS = {'jax', 'jaxlib', 'numpy', 'kernels_pallas'}


def sources(*folders):
  files = [p for f in folders for p in sorted((ROOT / f).rglob('*.py'))]
  return [p for p in files if '__pycache__' not in p.parts]


def name_of(path):
  return str(path.relative_to(ROOT))


@functools.cache
def tree(path):
  return ast.parse(path.read_text(encoding='utf-8'))


def imports(path):
  """Absolute dotted names that a file imports, relative ones resolved."""
  package = path.relative_to(ROOT).parts[:-1]
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = package[: len(package) + 1 - node.level] if node.level else ()
      module = '.'.join([*base, *([node.module] if node.module else [])])
      # `from tmlib import mil` names a package by its alias.
      yield from (f'{module}.{alias.name}' for alias in node.names)


def stands_on(path, name):
  """None where `path` may import `name`, else why it may not."""
  parts = path.relative_to(ROOT).parts
  target = name.split('.')
  if parts[0] == 'kernels_pallas':
    ours = target[0] in ('tmlib', 'experiments', 'configs')
    return 'the ground floor imports jax only' if ours else None
  if parts[0] == 'tmlib' and target[0] in ('experiments', 'configs', 'tests'):
    return 'the library knows no experiment'
  if parts[0] == 'configs' and target[0] in (*LIBRARY, 'jax'):
    light = name.startswith('tmlib.config.')
    return None if light else 'a config holds names and numbers only'
  if parts[0] != 'tmlib' or target[0] != 'tmlib' or len(parts) < 3:
    return None
  here, there = parts[1], target[1] if len(target) > 1 else ''
  folders = {p.name for p in (ROOT / 'tmlib').iterdir() if p.is_dir()}
  if there not in folders or here == there:
    return None
  family = 3
  if SHARED.get(here, family) > SHARED.get(there, family):
    return None
  if (here, there) in BUILT_ON:
    return None
  return f'{here} does not stand on {there}'


@pytest.mark.parametrize('path', sources(*CODE), ids=name_of)
def test_imports_run_downwards(path):
  wrong = [(n, why) for n in imports(path) if (why := stands_on(path, n))]
  assert not wrong


def test_the_arrow_check_sees_a_wrong_import(tmp_path):
  here = ROOT / 'tmlib' / 'train' / 'x.py'
  assert stands_on(here, 'tmlib.mil.bag')
  assert stands_on(ROOT / 'tmlib' / 'ops' / 'x.py', 'tmlib.train.fit')
  assert stands_on(ROOT / 'kernels_pallas' / 'graph' / 'x.py', 'tmlib.ops')
  assert not stands_on(here, 'tmlib.ops.graph')


@pytest.mark.parametrize('path', sources('kernels_pallas'), ids=name_of)
def test_kernels_import_jax_only(path):
  outside = {name.split('.')[0] for name in imports(path)}
  assert outside <= KERNEL_IMPORTS | sys.stdlib_module_names


def test_no_cycle_between_tmlib_folders():
  edges = {}
  for path in sources('tmlib'):
    parts = path.relative_to(ROOT).parts
    if len(parts) < 3:
      continue
    for name in imports(path):
      target = name.split('.')
      if target[0] == 'tmlib' and len(target) > 1 and target[1] != parts[1]:
        edges.setdefault(parts[1], set()).add(target[1])
  seen, done = set(), set()

  def visit(folder):
    assert folder not in seen - done, f'an import cycle runs through {folder}'
    seen.add(folder)
    for other in edges.get(folder, ()):
      if other not in done:
        visit(other)
    done.add(folder)

  for folder in list(edges):
    visit(folder)


@pytest.mark.parametrize('path', sources(*CODE, 'tests'), ids=name_of)
def test_files_and_functions_are_short(path):
  lines = path.read_text(encoding='utf-8').splitlines()
  limit = 700 if path.relative_to(ROOT).parts[0] == 'kernels_pallas' else 500
  assert len(lines) <= limit
  long = {
    node.name: code_lines(node)
    for node in ast.walk(tree(path))
    if isinstance(node, ast.FunctionDef) and code_lines(node) > 80
  }
  assert not long


def code_lines(function):
  """Lines of a function less its docstring and the functions inside it.

  A method is a closure of a few functions, each of which is counted alone; the
  closure as a whole may still hold 110 lines.
  """
  total = function.end_lineno - function.lineno + 1
  first = function.body[0]
  if ast.get_docstring(function) is not None:
    total -= first.end_lineno - first.lineno + 1
  inner = [
    node.end_lineno - node.lineno + 1
    for node in function.body
    if isinstance(node, ast.FunctionDef)
  ]
  return total if total > 110 else total - sum(inner)


@pytest.mark.parametrize('path', sources(*CODE), ids=name_of)
def test_every_module_says_what_it_is(path):
  assert ast.get_docstring(tree(path))


@pytest.mark.parametrize('path', sources(*CODE, 'tests'), ids=name_of)
def test_nothing_is_left_undone(path):
  text = path.read_text(encoding='utf-8')
  marks = ('TO' + 'DO', 'FIX' + 'ME', 'XX' + 'X')
  assert not [mark for mark in marks if mark in text]


@pytest.mark.parametrize('folder', LIBRARY)
def test_every_folder_is_a_package_with_all(folder):
  folders = {p.parent for p in sources(folder)}
  for place in folders:
    init = place / '__init__.py'
    assert init.is_file(), f'{name_of(place)} holds code but no __init__.py'
    assert declared(init) is not None, f'{name_of(init)} has no __all__'


def declared(path):
  """The names in a file's literal __all__, or None."""
  for node in tree(path).body:
    if isinstance(node, ast.Assign):
      targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
      if '__all__' in targets:
        return ast.literal_eval(node.value)
  return None


def modules(*folders):
  for path in sources(*folders):
    if path.stem.startswith('_') and path.stem != '__init__':
      continue
    parts = path.relative_to(ROOT).with_suffix('').parts
    yield '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@pytest.mark.parametrize('name', list(modules(*LIBRARY)))
def test_public_names_exist_and_are_documented(name):
  module = importlib.import_module(name)
  names = getattr(module, '__all__', None)
  assert names is not None, 'no __all__'
  assert len(set(names)) == len(names)
  for public in names:
    thing = getattr(module, public)
    # An alias of a type has no docstring of its own, a comment above it.
    if not callable(thing) or typing.get_origin(thing) is not None:
      continue
    assert (thing.__doc__ or '').strip(), f'{name}.{public} has no docstring'


@pytest.mark.parametrize('path', sources(*LIBRARY), ids=name_of)
def test_public_functions_are_annotated(path):
  public = set(declared(path) or ())
  for node in tree(path).body:
    if isinstance(node, ast.FunctionDef) and node.name in public:
      arguments = [*node.args.posonlyargs, *node.args.args]
      arguments += node.args.kwonlyargs
      bare = [a.arg for a in arguments if a.annotation is None]
      assert not bare, f'{node.name}: no annotation on {bare}'
      assert node.returns is not None, f'{node.name}: no return annotation'


@pytest.mark.parametrize('path', sources(*LIBRARY), ids=name_of)
def test_no_function_shadows_its_module_or_package(path):
  parts = path.relative_to(ROOT).with_suffix('').parts
  names = {p for p in parts if p != '__init__'}
  defined = {
    node.name
    for node in tree(path).body
    if isinstance(node, (ast.FunctionDef, ast.ClassDef))
  }
  assert not defined & names
  if parts[-1] == '__init__':
    # `from .evolve import evolve` would hide the module `evolve`.
    siblings = {p.stem for p in path.parent.glob('*.py')}
    siblings |= {p.name for p in path.parent.iterdir() if p.is_dir()}
    taken = set(declared(path) or ()) & siblings
    hidden = [n for n in taken if not is_module(path, n)]
    assert not hidden, f'{hidden} hide modules of the same name'


def is_module(init, name):
  package = '.'.join(init.relative_to(ROOT).parts[:-1])
  return type(getattr(importlib.import_module(package), name)).__name__ == (
    'module'
  )


def calls(path, name):
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Call):
      called = node.func
      found = getattr(called, 'attr', getattr(called, 'id', None))
      if found == name:
        yield node


@pytest.mark.parametrize('path', sources(*CODE, 'tests'), ids=name_of)
def test_meshes_name_their_axis_types(path):
  for node in calls(path, 'make_mesh'):
    # Our own helpers of that name take their axes from elsewhere.
    owner = getattr(node.func, 'value', None)
    if getattr(owner, 'id', None) in ('jax', 'sharding'):
      keywords = {keyword.arg for keyword in node.keywords}
      assert 'axis_types' in keywords, f'line {node.lineno}'


@pytest.mark.parametrize('path', sources(*CODE), ids=name_of)
def test_no_global_flag_is_set(path):
  # The compilation cache changes no number, is asked for and put back.
  if name_of(path) == 'tmlib/train/cache.py':
    return
  for node in calls(path, 'update'):
    assert ast.unparse(node.func) != 'jax.config.update', f'line {node.lineno}'


@pytest.mark.parametrize('path', sources(*LIBRARY), ids=name_of)
def test_no_bare_assert_in_the_library(path):
  lines = [n.lineno for n in ast.walk(tree(path)) if isinstance(n, ast.Assert)]
  assert not lines
