"""The static model against published timings of attention on TPUs.

Part of kernels_static.py (`--timings=DIR`, the folder that holds tpu_v5,
tpu_v6_lite, tpu7x). The timings are those of tokamax (Apache-2.0): JSON of
{arguments: {block sizes: {evaluation_times_ms}}}.

Two models are asked about the same shapes:
- kernel: estimated cycles of our attention over the clock, against the measured
  flash attention. These are two kernels of one kind, each with blocks of its
  own, so the ratio says less than the correlation. One or two heads of one
  sequence are simulated, the others cost the same.
- XLA: optimal_seconds of XLA's plain attention against the measured one.
"""

import argparse
import json
import pathlib
import re
import statistics
from typing import Any, NamedTuple

import numpy as np

__all__ = ['Timing', 'compare', 'log_correlation', 'read_timings', 'spread']

FOLDERS = {'v5p': 'tpu_v5', 'v6e': 'tpu_v6_lite', '7x': 'tpu7x'}
FILES = {
  'kernel': 'pallas_mosaic_tpu_flash_attention.json',
  'XLA': 'dot_product_attention.json',
}
# Operands of more bytes, and longer sequences, are not compiled.
LARGEST = 2**31
LONGEST = 2**13


class Timing(NamedTuple):
  """A measured call of attention in bfloat16.

  shape: B, T, S, H, G, D, V. seconds: median of the best block sizes.
  """

  shape: tuple[int, ...]
  causal: bool
  seconds: float


def _dims(text: str) -> tuple[str, tuple[int, ...]] | None:
  found = re.fullmatch(r'(\w+)\[([\d,]+)\]', text)
  if found is None:
    return None
  return found[1], tuple(int(x) for x in found[2].split(','))


def _timing(
  arguments: dict[str, Any], configs: dict[str, Any]
) -> Timing | None:
  arrays = [_dims(str(arguments[x])) for x in 'qkv']
  mask = arguments['mask'] or {}
  odd = ('bool_mask', 'q_start', 'q_end', 'k_start', 'k_end')
  if (
    None in arrays
    or arguments['bias'] is not None
    or arguments['return_residuals']
    or arguments['logits_soft_cap'] is not None
    or any(mask.get(x) is not None for x in odd)
  ):
    return None
  (kind, q), (_, k), (_, v) = (x for x in arrays if x)
  if kind != 'bf16' or len(q) != 4:
    return None
  medians = [
    statistics.median(x['evaluation_times_ms']) for x in configs.values()
  ]
  if not medians:
    return None
  shape = (*q[:2], k[1], q[2], k[2], q[3], v[3])
  return Timing(shape, bool(mask.get('is_causal')), min(medians) / 1e3)


def read_timings(text: str) -> list[Timing]:
  """Plain and causal calls in bfloat16, without residuals."""
  found = (
    _timing(json.loads(arguments), configs)
    for arguments, configs in json.loads(text).items()
  )
  return [x for x in found if x is not None]


def spread(timings: list[Timing], count: int) -> list[Timing]:
  """That many of them, from the shortest to the longest, evenly in rank.

  Those whose operands are large or long, or whose keys and queries differ in
  number, are left out: the first are slow to simulate, and what `causal` means
  for the second is not said.
  """
  size = lambda x: x.shape[0] * x.shape[2] * x.shape[4] * x.shape[5] * 2
  small = [
    x
    for x in timings
    if size(x) < LARGEST and x.shape[1] == x.shape[2] <= LONGEST
  ]
  small = sorted(small, key=lambda x: x.seconds)
  if len(small) <= count:
    return small
  places = np.linspace(0, len(small) - 1, count).round().astype(int)
  return [small[n] for n in places]


def log_correlation(a: list[float], b: list[float]) -> float:
  """Of logarithms; NaN for fewer than three."""
  if len(a) < 3:
    return float('nan')
  return float(np.corrcoef(np.log(a), np.log(b))[0, 1])


def _estimate(model: str, timing: Timing, chip: Any) -> tuple[float, str]:
  """Seconds, NaN with a reason where there is no estimate."""
  import jax
  import jax.numpy as jnp

  from experiments.benchmarks.kernels_static import kernel_rows, xla_row
  from kernels_pallas.softmax_attention import attention

  b, t, s, h, g, d, v = timing.shape
  scale = 1
  if model == 'kernel':
    # Heads cost the same, and the simulation of a grid is slow: see profile.
    few = min(h, 2 if t < LONGEST else 1)
    scale, b, h, g = b * h / few, 1, few, few
  shapes = (b, t, h, d), (b, s, g, d), (b, s, g, v)
  operands = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
  if model == 'XLA':
    plain = lambda q, k, v: jax.nn.dot_product_attention(
      q, k, v, is_causal=timing.causal, implementation='xla'
    )
    row = xla_row(plain, operands, chip)
  else:
    function = lambda q, k, v: attention(q, k, v, causal=timing.causal)
    (row,) = kernel_rows(function, operands, chip, 0)
  if not row.get('cycles'):
    return float('nan'), row['reason']
  return scale * row['cycles'] / chip.clock, ''


def compare(flags: argparse.Namespace) -> None:
  """Writes timings.jsonl and timings.md into `flags.out`."""
  from experiments.benchmarks.kernels_static import missing, versions
  from kernels_pallas.tuning import CHIPS

  flags.out.mkdir(parents=True, exist_ok=True)
  count = 3 if flags.quick else 7
  lacking, rows = missing(), []
  for name, folder in FOLDERS.items():
    if (flags.chips and name not in flags.chips) or name in lacking:
      continue
    for model, file in FILES.items():
      text = (flags.timings / folder / file).read_text(encoding='utf-8')
      for timing in spread(read_timings(text), count):
        seconds, why = _estimate(model, timing, CHIPS[name])
        row = {'chip': name, 'model': model, **timing._asdict()}
        rows.append(row | {'estimate': seconds, 'reason': why[:200]})
        print(json.dumps(rows[-1]), flush=True)
  path: pathlib.Path = flags.out / 'timings.jsonl'
  path.write_text(''.join(json.dumps(x) + '\n' for x in rows), 'utf-8')
  (flags.out / 'timings.md').write_text(summary(rows, versions()), 'utf-8')


def summary(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
  """A line of markdown per chip and model."""
  out = [
    'Static model against published timings (tokamax); '
    + ', '.join(f'{k} {v}' for k, v in about.items()),
    '',
    '| chip | model | shapes | log-correlation | measured over model |',
    '| --- | --- | --- | --- | --- |',
  ]
  for chip, model in dict.fromkeys((x['chip'], x['model']) for x in rows):
    mine = [x for x in rows if (x['chip'], x['model']) == (chip, model)]
    good = [x for x in mine if x['estimate'] == x['estimate']]
    measured = [x['seconds'] for x in good]
    estimate = [x['estimate'] for x in good]
    ratios = sorted(a / b for a, b in zip(measured, estimate, strict=True))
    told = (
      f'{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})'
      if ratios
      else ''
    )
    out.append(
      f'| {chip} | {model} | {len(good)} of {len(mine)} '
      f'| {log_correlation(measured, estimate):.3f} | {told} |'
    )
  return '\n'.join(out) + '\n'
