"""Tables and the picture of kernels_static.py."""

import pathlib
from typing import Any

__all__ = ['picture', 'table', 'totals']

_TPUS = ('v4', 'v5e', 'v5p', 'v6e', '7x')
_UNITS = ('MATMUL', 'XLU', 'VALU', 'EUP')


def _number(x: Any, form: str = ',') -> str:
  return '' if x is None else format(x, form)


def _blocks(blocks: Any) -> str:
  return 'chosen' if blocks is None else ' x '.join(map(str, blocks))


def _over(row: dict[str, Any]) -> float | None:
  cycles = row.get('cycles')
  return cycles / row['floor_cycles'] if cycles else None


def _tpu_line(row: dict[str, Any]) -> list[str]:
  units = row.get('units') or {}
  share = lambda x: f'{100 * units[x]:.0f}' if x in units else ''
  vmem = row.get('vmem')
  return [
    row['who'],
    _blocks(row['blocks']),
    row['kernel'],
    _number(row.get('cycles')),
    _number(_over(row), '.2f'),
    _number(row.get('bundles')),
    *(share(x) for x in _UNITS),
    _number(row.get('spills')),
    '' if vmem is None else f'{vmem / 2**20:.1f}',
    row['reason'] if row['compiles'] else f'NO: {row["reason"]}',
  ]


def _gpu_line(row: dict[str, Any]) -> list[str]:
  shared, share = row.get('shared'), row.get('occupancy')
  return [
    row['who'],
    _blocks(row['blocks']),
    row['kernel'],
    _number(row.get('threads')),
    _number(row.get('registers')),
    _number(row.get('spills')),
    '' if shared is None else f'{shared / 1024:.0f}',
    '' if share is None else f'{100 * share:.0f}',
    _number(row.get('tensor')),
    _number(row.get('exps')),
    row['reason'] if row['compiles'] else f'NO: {row["reason"]}',
  ]


_TPU_HEAD = [
  'who', 'blocks', 'kernel', 'cycles', 'over the floor', 'bundles a step',
  *(f'{x} %' for x in _UNITS), 'spills', 'VMEM MiB', 'remark',
]  # fmt: skip
_GPU_HEAD = [
  'who', 'blocks', 'kernel', 'threads', 'registers', 'spilled bytes',
  'shared KiB', 'occupancy %', 'tensor instructions', 'exp instructions',
  'remark',
]  # fmt: skip


def _lines(head: list[str], body: list[list[str]]) -> list[str]:
  clean = lambda x: ' '.join(x.replace('|', '/').split())[:160]
  row = lambda cells: '| ' + ' | '.join(map(clean, cells)) + ' |'
  return [row(head), '|' + ' --- |' * len(head), *map(row, body), '']


def table(done: dict[str, Any], date: str) -> str:
  """Markdown of all rows, a part for each op, shape, pass and chip.

  Args:
    done: missing compilers and rows, of `kernels_static.run`.
    date: of the run.
  """
  made = {}
  for row in done['rows']:
    told = ', '.join(f'{k} {v}' for k, v in row['versions'].items())
    made[f'- {told}: `{row["command"]}`'] = None
  out = [
    '# Kernels, as the compilers see them',
    '',
    f'{date}, by `experiments/benchmarks/kernels_static.py` with',
    '',
    *made,
    '',
    'Every figure is a **compiler estimate** or a property of compiled code; '
    'none is a measurement.',
    '',
    '- cycles: of the whole grid on one device, the kernel alone, operands in '
    'device memory; for plain XLA its own model of the whole program.',
    '- over the floor: cycles over what matrix rate or bandwidth allow at '
    'least, counting visible pairs only, of all kernels of a pass together. '
    'Below 1, the compiler counts on more bandwidth than the data sheet.',
    '- bundles a step: instructions of the loop over the grid, all branches.',
    '- MATMUL, XLU, VALU, EUP: filled share of the slots of the matrix, '
    'permutation, vector and transcendental units, over the code.',
    '- spills: stores of spilled registers in the code. v4 has no model of its '
    'DMA, hence no cycles.',
    '',
  ]
  for chip, why in done['missing'].items():
    out += [f'{chip} is left out: {why}.', '']
  parts: dict[tuple[str, ...], list[dict[str, Any]]] = {}
  for row in done['rows']:
    name = row['op'], row['shape'], row['pass'], row['chip']
    parts.setdefault(name, []).append(row)
  for name, rows in parts.items():
    tpu = name[3] in _TPUS
    out += [f'## {name[0]}, {name[1]}, {name[2]}, {name[3]}', '']
    line = _tpu_line if tpu else _gpu_line
    out += _lines(_TPU_HEAD if tpu else _GPU_HEAD, [line(x) for x in rows])
  return '\n'.join(out)


def totals(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], float]:
  """Best cycles over the floor of each (op, shape, pass, chip, who).

  The kernels of one pass add up; of several block sizes the best counts.
  """
  sums: dict[tuple[Any, ...], float | None] = {}
  for row in rows:
    name = (
      *(row[x] for x in ('op', 'shape', 'pass', 'chip', 'who')),
      str(row['blocks']),
    )
    over = _over(row)
    before = sums.get(name, 0.0)
    sums[name] = None if over is None or before is None else before + over
  best: dict[tuple[str, ...], float] = {}
  for name, value in sums.items():
    if value is not None:
      best[name[:5]] = min(value, best.get(name[:5], value))
  return best


def picture(rows: list[dict[str, Any]], path: pathlib.Path) -> bool:
  """Bars of cycles over the floor: a panel per op, shape and pass.

  Returns:
    Whether there was anything to draw.
  """
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt
  from matplotlib import ticker

  best = totals(rows)
  panels = list(dict.fromkeys(x[:3] for x in best))
  if not panels:
    return False
  columns = min(3, len(panels))
  lines = -(-len(panels) // columns)
  figure, axes = plt.subplots(
    lines, columns, figsize=(5 * columns, 3.2 * lines), squeeze=False
  )
  people = sorted(dict.fromkeys(x[4] for x in best), key=lambda x: x != 'ours')
  colours = {who: f'C{n}' for n, who in enumerate(people)}
  for ax, panel in zip(axes.flat, panels, strict=False):
    here = {x[3:]: v for x, v in best.items() if x[:3] == panel}
    chips = [c for c in _TPUS if any(k[0] == c for k in here)]
    present = [w for w in people if any(k[1] == w for k in here)]
    width = 0.8 / len(present)
    for n, who in enumerate(present):
      at = [i for i, c in enumerate(chips) if (c, who) in here]
      heights = [here[chips[i], who] for i in at]
      places = [i + (n - (len(present) - 1) / 2) * width for i in at]
      ax.bar(places, heights, width, color=colours[who], label=who)
    ax.axhline(1, color='black', linewidth=0.8)
    ax.set_xticks(range(len(chips)), chips)
    ax.set_yscale('log')
    ax.set_ylim(bottom=0.5)
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    ax.set_title(', '.join(panel), fontsize=10)
    ax.set_ylabel('cycles over the floor')
    ax.legend(fontsize=7)
  for ax in axes.flat[len(panels) :]:
    ax.set_axis_off()
  figure.suptitle('Compiler estimates, not measurements (best blocks of each)')
  figure.tight_layout(rect=(0, 0, 1, 0.98))
  figure.savefig(path, dpi=120)
  plt.close(figure)
  return True
