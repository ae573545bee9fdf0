import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmlib.ops.packing import plan_packing, slot_table

_lengths = st.lists(st.integers(0, 50), max_size=60)


@settings(max_examples=150, deadline=None)
@given(
  lengths=_lengths,
  capacity=st.integers(50, 120),
  max_segments=st.integers(1, 6),
  seed=st.none() | st.integers(0, 1000),
  window=st.integers(1, 64),
)
def test_every_plan_is_valid(lengths, capacity, max_segments, seed, window):
  plan = plan_packing(lengths, capacity, max_segments, seed=seed, window=window)
  cells = np.zeros((plan.num_rows, capacity), int)
  for item, length in enumerate(lengths):
    start = plan.offset[item]
    assert 0 <= start <= capacity - length
    cells[plan.row[item], start : start + length] += 1
  assert cells.max(initial=0) <= 1  # no two items overlap
  counts = np.bincount(plan.row, minlength=plan.num_rows)
  assert counts.max(initial=0) <= max_segments
  assert counts.min(initial=1) >= 1  # no empty row
  table = slot_table(plan)
  assert sorted(table[table >= 0]) == list(range(len(lengths)))
  for row, slots in enumerate(table):  # slots are used from the left
    used = slots >= 0
    assert used[: counts[row]].all()
    assert not used[counts[row] :].any()
  assert plan.fill == pytest.approx(cells.mean() if cells.size else 0)


def test_by_hand():
  # 7+3 and 6+4 fill two rows of 10; plain first fit would need three.
  plan = plan_packing([3, 4, 6, 7], 10, 4)
  assert plan.num_rows == 2
  assert plan.fill == 1
  np.testing.assert_array_equal(plan.row, [0, 1, 1, 0])
  np.testing.assert_array_equal(plan.offset, [7, 6, 0, 0])
  np.testing.assert_array_equal(
    slot_table(plan), [[3, 0, -1, -1], [2, 1, -1, -1]]
  )


def test_the_limit_of_items_binds():
  assert plan_packing([1] * 10, 100, 4).num_rows == 3


def test_guarantee_of_best_fit_decreasing():
  # Rows that are cut at random fill exactly, so the optimum is known: 40.
  rng = np.random.default_rng(0)
  for _ in range(20):
    cuts = np.sort(rng.integers(1, 100, (40, 3)), axis=1)
    lengths = np.diff(cuts, axis=1, prepend=0, append=100).ravel()
    rows = plan_packing(rng.permutation(lengths), 100, 100).num_rows
    assert 40 <= rows <= 11 / 9 * 40 + 6 / 9


def test_seeds_mix_items_and_repeat():
  lengths = np.random.default_rng(0).integers(10, 60, 500)
  plan = lambda seed: plan_packing(lengths, 128, 8, seed=seed, window=64)
  a, b, again = plan(1), plan(2), plan(1)
  np.testing.assert_array_equal(a.row, again.row)
  mates = lambda p: {tuple(sorted(r[r >= 0])) for r in slot_table(p)}
  assert len(mates(a) & mates(b)) < 0.1 * a.num_rows
  assert min(a.fill, b.fill) > 0.85


def test_ten_thousand_items_take_well_under_a_second():
  lengths = np.random.default_rng(0).integers(1, 1000, 10_000)
  start = time.process_time()
  plan = plan_packing(lengths, 1024, 16)
  assert time.process_time() - start < 2  # about 0.03 s on an idle machine
  assert plan.fill > 0.95


@pytest.mark.parametrize(
  ('lengths', 'capacity', 'segments', 'words'),
  [
    ([5, 12], 10, 4, 'item: length = 1: 12'),
    ([-1], 10, 4, r'outside \[0, capacity=10\]'),
    ([1.5], 10, 4, 'integers'),
    ([[1]], 10, 4, 'vector'),
    ([1], 0, 4, 'capacity must be >= 1'),
    ([1], 10, 0, 'max_segments'),
  ],
)
def test_errors_name_the_value(lengths, capacity, segments, words):
  with pytest.raises(ValueError, match=words):
    plan_packing(lengths, capacity, segments)
