"""The kernel reports: what they read, and that a row of each comes out."""

import importlib.util
import json
import math

import jax
import pytest

from experiments.benchmarks import (
  kernels_device,
  kernels_known,
  kernels_peers,
  kernels_report,
  kernels_static,
  kernels_timings,
)
from kernels_pallas.tuning import CHIPS, all_cases, find_kernels
from kernels_pallas.tuning.cases import backward, structs

# The fields that are read, of one published timing.
ARGUMENTS = {
  'q': 'bf16[1,16384,16,128]',
  'k': 'bf16[1,16384,16,128]',
  'v': 'bf16[1,16384,16,128]',
  'bias': None,
  'logits_soft_cap': None,
  'mask': {'bool_mask': None, 'q_start': None, 'is_causal': True},
  'return_residuals': False,
}
CONFIGS = {
  '{"block_q":1024,"block_kv":1024}': {'evaluation_times_ms': [4.1, 3.9, 4.0]},
  '{"block_q":128,"block_kv":128}': {'evaluation_times_ms': [9.0, 9.0, 9.1]},
}


def timings(**changes):
  entry = json.dumps(ARGUMENTS | changes)
  return kernels_timings.read_timings(json.dumps({entry: CONFIGS}))


def test_published_timings_are_read():
  (found,) = timings()
  assert found.shape == (1, 16384, 16384, 16, 16, 128, 128)
  assert found.causal
  assert found.seconds == pytest.approx(4.0e-3)
  assert timings(mask={'bool_mask': 'bool[1,1,4,4]'}) == []
  assert timings(return_residuals=True) == []
  assert timings(q='f32[1,16384,16,128]') == []


def test_a_spread_holds_both_ends():
  all_ = [
    kernels_timings.Timing((1, 128, 128, 1, 1, 64, 64), False, seconds)
    for seconds in (5.0, 1.0, 2.0, 4.0, 3.0)
  ]
  found = kernels_timings.spread(all_, 3)
  assert [x.seconds for x in found] == [1, 3, 5]
  huge = all_[0]._replace(shape=(64, 65536, 65536, 64, 64, 128, 128))
  assert kernels_timings.spread([huge], 3) == []


def test_agreement_of_model_and_timings():
  assert kernels_timings.log_correlation([1, 10, 100], [2, 20, 200]) == (
    pytest.approx(1)
  )
  assert math.isnan(kernels_timings.log_correlation([1, 2], [1, 2]))
  row = {'chip': 'v6e', 'model': 'XLA', 'reason': ''}
  rows = [
    row | {'seconds': 2.0**n, 'estimate': 2.0 ** (n - 1)} for n in range(3)
  ]
  rows.append(row | {'seconds': 1.0, 'estimate': float('nan')})
  text = kernels_timings.summary(rows, {'jax': '1'})
  assert '| v6e | XLA | 3 of 4 | 1.000 | 2.00 (2.00 to 2.00) |' in text


def row(who, cycles, **more):
  return {
    'op': 'gmm',
    'shape': 'large',
    'pass': 'forward',
    'chip': 'v5e',
    'who': who,
    'blocks': None,
    'kernel': 'block_gmm',
    'compiles': True,
    'reason': '',
    'cycles': cycles,
    'floor_cycles': 100,
    'units': {'MATMUL': 0.5, 'XLU': 0, 'VALU': 0.25, 'EUP': 0},
    'vmem': 2**20,
    'bundles': 1234,
    'spills': 7,
    'versions': {'jax': '1.2'},
    'command': '--ops=gmm',
    **more,
  }


def test_a_table_and_a_picture(tmp_path):
  gpu = {'chip': 'H100', 'registers': 96, 'spills': 0, 'cycles': None}
  rows = [
    row('ours', 250),
    row('ours', 150, blocks=[256, 512]),
    row('ours', 20, blocks=[256, 512], kernel='second'),
    row('peer', 300),
    row('failed', None, compiles=False, reason='vmem | full'),
    row('ours', **gpu),
  ]
  done = {'rows': rows, 'missing': {'v4': 'no'}}
  text = kernels_report.table(done, '2026-01-01')
  assert text.count('- jax 1.2: `--ops=gmm`\n') == 1
  assert 'v4 is left out: no.' in text
  assert (
    '| ours | chosen | block_gmm | 250 | 2.50 | 1,234 | 50 | 0 | 25 | 0 | 7 '
    '| 1.0 |  |'
  ) in text
  assert 'NO: vmem / full' in text
  assert '## gmm, large, forward, H100' in text
  # Both kernels of the best blocks count, and what failed does not.
  assert kernels_report.totals(rows) == {
    ('gmm', 'large', 'forward', 'v5e', 'ours'): pytest.approx(1.7),
    ('gmm', 'large', 'forward', 'v5e', 'peer'): 3,
  }
  assert kernels_report.picture(rows, tmp_path / 'x.png')
  assert (tmp_path / 'x.png').stat().st_size > 1000
  assert not kernels_report.picture([], tmp_path / 'y.png')


def test_rows_of_several_runs_are_joined(tmp_path):
  for name, rows in {
    'a': [row('x', 1), row('y', 2)],
    'b': [row('x', 3), row('x', 4)],
  }.items():
    (tmp_path / name).mkdir()
    lines = ''.join(json.dumps(x) + '\n' for x in rows)
    (tmp_path / name / 'rows.jsonl').write_text(lines, encoding='utf-8')
  flags = kernels_static.arguments(
    [f'--out={tmp_path}/c', f'--join={tmp_path}/a,{tmp_path}/b']
  )
  found = kernels_static.join(flags)['rows']
  # Two kernels of one name are two rows.
  want = [('x', 3), ('y', 2), ('x', 4)]
  assert [(x['who'], x['cycles']) for x in found] == want


def case(op, shape):
  return next(c for c in all_cases() if (c.op, c.shape) == (op, shape))


def test_peers_are_found_at_our_shapes():
  causal = case('attention', 'causal')
  kernels = lambda f, c: find_kernels(f, structs(c), CHIPS['v5e'])
  (flash,) = kernels(kernels_peers.flash(causal, (512, 1024)), causal)
  assert flash.grid == (2, 4, 4, 2)
  assert kernels_peers.flash(case('attention', 'chunk'), (512, 1024)) is None


def test_equal_groups_are_known_to_ours_and_to_the_peer():
  even = case('gmm', 'even')
  per = int(even.operands[2][0])
  theirs = kernels_peers.megablox(even, (256, 1024, 1024))
  for function in (even.make((256, 1024, 1024), None), theirs):
    kernels = lambda f=function: [
      k.grid for k in find_kernels(backward(f), structs(even), CHIPS['v5e'])
    ]
    with kernels_known.equal_groups(per):
      forward, rows, matrices = kernels()
    # A step per tile of rows: the product, and its two transposed ones.
    steps = even.operands[0].shape[0] // 256
    assert forward == rows == (1, steps, 1)
    assert matrices == (1, 1, steps)
    assert not isinstance(kernels()[0][1], int)
  with (
    kernels_known.equal_groups(500),
    pytest.raises(ValueError, match='256 rows do not divide groups of 500'),
  ):
    find_kernels(theirs, structs(even), CHIPS['v5e'])


def test_every_case_names_what_can_be_traced():
  cases = all_cases()
  names = [(c.op, c.shape) for c in cases]
  assert len(set(names)) == len(names)
  for c in cases:
    assert c.flops > 0
    assert c.bytes_moved > 0
    if c.shape.startswith('tiny'):
      ours = jax.eval_shape(c.make(None, 'xla'), *structs(c))
      plain = jax.eval_shape(c.reference, *structs(c))
      shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
      assert shapes(ours) == shapes(plain)


def test_without_compilers_each_chip_is_named(monkeypatch, tmp_path):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  flags = kernels_static.arguments([f'--out={tmp_path}', '--ops=gmm'])
  done = kernels_static.run(flags)
  assert done['rows'] == []
  assert set(done['missing']) == set(CHIPS)
  assert 'libtpu is missing' in done['missing']['v5e']
  assert 'jax-cuda13-plugin is missing' in done['missing']['A100']


@pytest.mark.aot
def test_a_quick_row_and_its_memory(monkeypatch, tmp_path):
  pytest.importorskip('libtpu')
  monkeypatch.setattr(kernels_static, 'versions', lambda: {'jax': '1.2'})
  flags = kernels_static.arguments(
    [f'--out={tmp_path}', '--quick', '--ops=xor_attention', '--shapes=tiny']
    + ['--chips=v5e', '--passes=forward']
  )
  (found,) = kernels_static.run(flags)['rows']
  assert found['compiles']
  assert found['cycles'] > found['floor_cycles'] > 0
  # The same command again computes nothing.
  monkeypatch.setattr(kernels_static, 'run_row', None)
  assert kernels_static.run(flags)['rows'] == [found]


def test_a_device_row(tmp_path):
  text = kernels_device.main(
    ['--quick', '--ops=ell_spmm', '--repeats=1', f'--out={tmp_path}']
  )
  assert (tmp_path / 'table.md').read_text(encoding='utf-8') == text
  rows = [x.split(' | ') for x in text.splitlines() if '| tiny |' in x]
  ways = [(x[2], x[3]) for x in rows]
  assert ('forward', 'ours') in ways
  assert ('both', 'segment sum') in ways
  # bfloat16 against float64.
  errors = [float(x[6]) for x in rows if x[3] == 'ours']
  assert len(errors) == 2
  assert all(0 < x < 2e-2 for x in errors)
