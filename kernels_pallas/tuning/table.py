"""Block sizes chosen beforehand, per op and chip.

`blocks.json` holds {op: {chip: {key: [sizes]}}}; what a key says is up to the
op (usually the dtype and the width). It is read when first asked for. A chip or
key that it does not hold is left to the op's own rule, and a caller who gives
sizes is always obeyed.
"""

import functools
import importlib.resources
import json

from kernels_pallas.tuning.chips import CHIPS, chip_in_use

__all__ = ['find_blocks', 'read_table']

Table = dict[str, dict[str, dict[str, tuple[int, ...]]]]


def read_table(text: str) -> Table:
  """The table in that JSON.

  Raises:
    ValueError: on an unknown chip, or sizes that are not positive multiples
      of 16.
  """
  table: Table = {}
  for op, chips in json.loads(text).items():
    if op.startswith('_'):
      continue
    for chip, rows in chips.items():
      if chip not in CHIPS:
        raise ValueError(f'{op}: chip {chip!r} must be one of {tuple(CHIPS)}')
      for key, sizes in rows.items():
        if not sizes or any(s < 16 or s % 16 for s in sizes):
          raise ValueError(
            f'{op}, {chip}, {key}: sizes {sizes} must be positive multiples '
            'of 16'
          )
    table[op] = {
      chip: {key: tuple(sizes) for key, sizes in rows.items()}
      for chip, rows in chips.items()
    }
  return table


@functools.cache
def _shipped() -> Table:
  folder = importlib.resources.files('kernels_pallas.tuning')
  return read_table((folder / 'blocks.json').read_text(encoding='utf-8'))


def find_blocks(
  op: str, key: str, chip: str | None = None
) -> tuple[int, ...] | None:
  """Sizes for a call of `op`, or None where the table has none.

  Args:
    op: a name in the table, as 'attention_forward'.
    key: what the op distinguishes, as 'bfloat16 128'.
    chip: a name in CHIPS; None is the chip of the current trace.
  """
  name = chip_in_use() if chip is None else chip
  return _shipped().get(op, {}).get(name or '', {}).get(key)
