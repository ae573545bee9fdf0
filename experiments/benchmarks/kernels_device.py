r"""Our kernels on the device at hand: numbers against float64, and times.

  python experiments/benchmarks/kernels_device.py [--out=DIR]
    [--ops=attention,gmm,diffuse] [--shapes='causal;decode'] [--repeats=10]
    [--quick]

On a GPU beside cuDNN's and XLA's attention, `lax.ragged_dot`, dense and
segment-sum message passing, and plain jax.numpy; on a TPU beside XLA only; on a
CPU our XLA paths at small sizes, which says whether this script works and no
more. The floor is what matrix rate or bandwidth of the chip allow at least, for
chips in CHIPS.

Errors are those of the call against float64 on the CPU, the largest over the
largest entry. No table of a GPU is kept in this repository yet: none
was at hand. Whoever has one, please run this and keep table.md, which names the
card and the date.
"""

import argparse
import datetime
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# The float64 reference holds all logits at once.
LARGEST_CHECK = 2e10
LARGEST_ON_CPU = 2e9


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
  """Of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--out', type=pathlib.Path)
  parser.add_argument('--ops', type=lambda x: x.split(','), default=[])
  # A name may hold a comma.
  parser.add_argument('--shapes', type=lambda x: x.split(';'), default=[])
  parser.add_argument('--repeats', type=int, default=10)
  parser.add_argument('--quick', action='store_true', help='tiny shapes only')
  return parser.parse_args(argv)


def message_peers(case: Any) -> dict[str, Callable[..., Any]]:
  """Dense where the matrix is small, and a sorted segment sum over edges."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  # Weights, features, then the arrays of the graph.
  count = 3 if case.op == 'diffuse' else 2
  nbr, emask = case.operands[count : count + 2]
  n = nbr.shape[0]
  rows = np.repeat(np.arange(n), nbr.shape[1]).reshape(nbr.shape)
  at = np.nonzero(emask)
  tail, head = rows[at], nbr[at]

  def weights(floats):
    *w, x = floats
    w = w[0] if len(w) == 1 else 0.3 * w[0] + 0.2 * w[1]
    return w[at], x

  def segment_sum(*operands):
    w, x = weights(operands[:count])
    near = x[head] - x[tail] if case.op == 'diffuse' else x[head]
    messages = w[:, None] * near
    return jax.ops.segment_sum(messages, tail, n, indices_are_sorted=True)

  def dense(*operands):
    w, x = weights(operands[:count])
    out = jnp.zeros((n, n), w.dtype).at[tail, head].set(w) @ x
    if case.op == 'diffuse':
      out -= (
        jax.ops.segment_sum(w, tail, n, indices_are_sorted=True)[:, None] * x
      )
    return out

  peers = {'segment sum': segment_sum}
  return peers | ({'dense': dense} if n <= 4096 else {})


def peers_of(case: Any, platform: str) -> dict[str, Callable[..., Any]]:
  """What runs beside us on that platform."""
  from experiments.benchmarks.kernels_peers import PEERS

  if case.op in ('ell_spmm', 'diffuse'):
    return message_peers(case)
  if case.op not in {peer.op for peer in PEERS}:
    return {'plain jax.numpy': case.reference}
  kinds = {'any', *(['device'] if platform == 'gpu' else [])}
  made = {
    peer.name: peer.make(case, None)
    for peer in PEERS
    if peer.op == case.op and peer.platform in kinds
  }
  return {name: f for name, f in made.items() if f is not None}


def errors(case: Any) -> list[list[float]]:
  """Of the results, and of the gradients, against float64 on the CPU."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from kernels_pallas.tuning.cases import backward, draw

  operands = draw(case)
  wide = lambda x: (
    np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
  )
  both = lambda f: jax.jit(lambda *x: (f(*x), backward(f)(*x)))
  got = both(case.make(None, None))(*operands)
  with jax.enable_x64(True), jax.default_device(jax.devices('cpu')[0]):
    want = both(case.reference)(*map(wide, operands))
  relative = lambda a, b: float(
    np.abs(wide(np.asarray(a)) - b).max() / np.abs(b).max()
  )
  return [
    [
      relative(a, np.asarray(b))
      for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    ]
    for x, y in zip(got, want, strict=True)
  ]


def measure(
  functions: dict[str, Callable[..., Any]], operands: Any, repeats: int
) -> dict[str, float | str]:
  """Median seconds in turns, or why there are none."""
  import jax

  programs, told = {}, {}
  for name, function in functions.items():
    try:
      programs[name] = jax.jit(function).lower(*operands).compile()
      jax.block_until_ready(programs[name](*operands))
    except Exception as error:  # What a peer can not do is a result, too.
      programs.pop(name, None)
      told[name] = f'{type(error).__name__}: {str(error).splitlines()[0]}'
  seconds = {name: [] for name in programs}
  for _ in range(repeats):
    for name, program in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(*operands))
      seconds[name].append(time.perf_counter() - start)
  return told | {n: statistics.median(s) for n, s in seconds.items()}


def rows_of(case: Any, repeats: int) -> list[list[str]]:
  """A row per pass and way."""
  import jax

  from kernels_pallas.tuning import CHIPS
  from kernels_pallas.tuning.cases import backward, draw
  from kernels_pallas.tuning.chips import chip_in_use

  platform, name = jax.default_backend(), chip_in_use()
  operands = jax.device_put(draw(case))
  ways = {'ours': case.make(None, None), **peers_of(case, platform)}
  both = errors(case) if case.flops <= LARGEST_CHECK else [[], []]
  rows = []
  for kind in ('forward', 'both'):
    made = ways
    if kind == 'both':
      made = {n: backward(f) for n, f in ways.items()}
    scale = (1.0, 1.0)
    if kind == 'both':
      scale = tuple(1 + x for x in case.scale)
    floor = None
    if name is not None:
      work = case.flops * scale[0], case.bytes_moved * scale[1]
      floor = CHIPS[name].floor(*work)
    for way, found in measure(made, operands, repeats).items():
      if isinstance(found, str):
        rows.append([case.op, case.shape, kind, way, '', '', '', found])
        continue
      off = both[kind == 'both']
      rows.append(
        [
          case.op,
          case.shape,
          kind,
          way,
          f'{1e3 * found:.3f}',
          '' if floor is None else f'{found / floor:.2f}',
          f'{max(off):.1e}' if off and way == 'ours' else '',
          '',
        ]
      )
  return rows


HEAD = ['op', 'shape', 'pass', 'way', 'ms', 'over the floor', 'error', 'remark']


def table(rows: list[list[str]], device: str, jax_version: str) -> str:
  """Markdown, with the card and the date."""
  line = lambda cells: (
    '| ' + ' | '.join(x.replace('|', '/') for x in cells) + ' |'
  )
  return '\n'.join(
    [
      f'Measured on {device}, {datetime.date.today().isoformat()}, jax '
      f'{jax_version}. bfloat16, diffuse in float32; "both" is forward and '
      'backward.',
      '',
      line(HEAD),
      '|' + ' --- |' * len(HEAD),
      *map(line, rows),
      '',
    ]
  )


def chosen(flags: argparse.Namespace, platform: str) -> list[Any]:
  """The cases to run; on a CPU the small ones."""
  from kernels_pallas.tuning import all_cases

  cases = [c for c in all_cases() if _wanted(c, flags)]
  if flags.quick:
    return [c for c in cases if c.shape.startswith('tiny')]
  most = LARGEST_ON_CPU if platform == 'cpu' else float('inf')
  return [c for c in cases if c.flops <= most]


def _wanted(case: Any, flags: argparse.Namespace) -> bool:
  op = not flags.ops or case.op in flags.ops
  return op and (not flags.shapes or case.shape in flags.shapes)


def main(argv: list[str] | None = None) -> str:
  """Prints the table as it grows, and returns and writes it."""
  import jax

  flags = arguments(argv)
  rows = []
  for case in chosen(flags, jax.default_backend()):
    for row in rows_of(case, flags.repeats):
      print('  '.join(row), flush=True)
      rows.append(row)
  text = table(rows, jax.devices()[0].device_kind, jax.__version__)
  if flags.out:
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / 'table.md').write_text(text, encoding='utf-8')
  return text


if __name__ == '__main__':
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  main()
