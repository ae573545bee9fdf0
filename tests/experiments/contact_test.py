"""Matched windows of contact: kinds, matching, folds, features, scores."""

import importlib.util
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import contact
from experiments import contact_report as report
from experiments import contact_windows as windows
from experiments.contact_windows import Window
from tmlib.data import SpotSection
from tmlib.mil import auroc

ROOT = pathlib.Path(__file__).resolve().parents[2]
GENES = (
  'PTPRC', 'CD3D', 'EPCAM', 'KRT8', 'TRAC', 'CCL5', 'COL1A1', 'DCN', 'MUC1',
  'X1', 'X2', 'X3', 'X4',
)  # fmt: skip


def a_section(name, seed, size=9):
  """Random spots of three kinds, whose genes tell them."""
  rng = np.random.default_rng(seed)
  x, y = np.divmod(np.arange(size * size), size)
  kinds = rng.choice(3, size * size, p=[0.5, 0.2, 0.3])
  rates = np.full((3, len(GENES)), 3.0)
  rates[1, [0, 1, 4, 5]] = 40
  rates[2, [2, 3, 8]] = 40
  counts = rng.poisson(rates[kinds]).astype(np.float32)
  return SpotSection(name, np.stack([x, y], 1), GENES, counts)


def a_study(names=('A1', 'B1', 'C1')):
  sections = [a_section(name, i) for i, name in enumerate(names)]
  return types.SimpleNamespace(sections=[], labelled=sections, folds=[])


@pytest.fixture
def config():
  path = ROOT / 'configs' / 'tmevolve_expression.py'
  spec = importlib.util.spec_from_file_location('tmevolve_expression', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  found = module.get_config()
  found.contact.update(
    genes=8, components=3, immune=('PTPRC', 'CD3D', 'CD19'),
    tumour=('EPCAM', 'KRT8'), tumour_share=0.3, immune_share=0.2, window=4,
    seeds=2, steps=2, bootstrap=100,
  )  # fmt: skip
  found.contact.network.update(hidden=4, regions=2, num_concepts=2, steps=1)
  return found


def test_kinds_are_shares_of_a_section_by_its_markers(config):
  section = a_section('A1', 0)
  kinds = windows.spot_kinds(section, config.contact)
  assert np.bincount(kinds).tolist() == [41, 16, 24]  # 20 and 30 % of 81
  logs = np.log1p(section.counts / section.counts.sum(1, keepdims=True) * 1e4)[
    :, :2
  ]  # CD19 is not measured
  score = ((logs - logs.mean(0)) / logs.std(0)).mean(1)
  assert score[kinds == 1].min() >= score[kinds != 1].max()
  # Only genes that mark tissue were high: what is immune is not tumour.
  assert section.counts[kinds == 2][:, 2:4].mean() > 15
  config.contact.immune = ('CD19',)
  with pytest.raises(ValueError, match='contact.immune.*A1 measures none'):
    windows.spot_kinds(section, config.contact)
  config.contact.immune_share = 0.7
  with pytest.raises(ValueError, match='contact.immune_share=0.7'):
    windows.spot_kinds(section, config.contact)


def test_windows_by_hand():
  grid = np.stack(np.divmod(np.arange(12), 4), 1)  # 3 x 4 spots
  kinds = np.full(12, 'c')
  full = lambda size, **options: [
    (w.counts, w.touch)
    for w in windows.find_windows(grid, kinds, size, pair=('a', 'b'), **options)
  ]
  kinds[[0, 3]] = 'a', 'b'
  assert full(4) == []  # does not fit three columns
  kinds[[0, 2]] = 'a', 'b'
  assert full(3) == [((1, 1), False)]
  kinds[[1, 2]] = 'a', 'b'
  assert full(3) == [((2, 1), True), ((1, 2), True)]
  kinds[:] = 'c'
  kinds[[0, 5]] = 'a', 'b'  # (0, 0) and (1, 1)
  assert full(3) == [((1, 1), False)]
  assert full(3, corners=True) == [((1, 1), True)]


def test_matched_windows_have_one_composition_per_section():
  make = lambda section, counts, touch, total: Window(
    section, (0, 0), np.arange(total), counts, touch
  )
  found = [
    make(0, (1, 2), True, 9), make(0, (1, 2), True, 7),
    make(0, (1, 2), False, 7), make(0, (2, 2), True, 9),
    make(1, (2, 2), False, 9), make(1, (3, 1), True, 9),
    make(1, (3, 1), False, 8),
  ]  # fmt: skip
  kept = windows.match_windows(found, 0)
  # The nearer of two; (2, 2) has its partner in another section.
  assert [w.counts for w in kept] == [
    (1, 2), (1, 2), (3, 1), (3, 1),
  ]  # fmt: skip
  assert [len(w.spots) for w in kept] == [7, 7, 9, 8]
  assert windows.match_windows([], 0) == []


def test_no_marker_reaches_the_features(config):
  study, other = a_study(), a_study()
  for section in other.labelled:
    section.counts[:, :4] = section.counts[::-1, :4] * 7
  patients = ['A', 'B', 'C']
  one, two = (
    windows.components(s.labelled, patients, config.contact)
    for s in (study, other)
  )
  for name in patients:
    for a, b in zip(one[name], two[name], strict=True):
      np.testing.assert_array_equal(a, b)
  genes, table = windows.signature_table(study.labelled, config.contact)
  assert genes == ('TRAC', 'CCL5', 'MUC1', 'COL1A1', 'DCN')
  np.testing.assert_array_equal(
    table[0], windows.signature_table(other.labelled, config.contact)[1][0]
  )
  marked = {*config.contact.immune, *config.contact.tumour}
  signatures = [g for group in windows.SIGNATURES.values() for g in group]
  assert not marked & {*signatures}
  assert len(signatures) == len({*signatures})


def test_the_real_markers_are_no_signatures():
  path = ROOT / 'configs' / 'tmevolve_expression.py'
  spec = importlib.util.spec_from_file_location('tmevolve_expression', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  contact_config = module.get_config().contact
  signatures = {g for group in windows.SIGNATURES.values() for g in group}
  assert not signatures & {*contact_config.immune, *contact_config.tumour}


def test_a_tested_patient_has_no_part_in_its_components(config):
  study, other = a_study(), a_study()
  changed = other.labelled[1]
  changed.counts[:] = changed.counts[:, ::-1] ** 2
  patients = ['A', 'B', 'C']
  one, two = (
    windows.components(s.labelled, patients, config.contact)
    for s in (study, other)
  )
  for i in (0, 2):
    np.testing.assert_array_equal(one['B'][i], two['B'][i])
  assert np.abs(one['A'][2] - two['A'][2]).max() > 0.01


def test_concept_rows():
  genes = ('TRAC', 'CCL5', 'MUC1', 'COL1A1', 'DCN', 'LUM')
  given = windows.concept_rows(genes, 'given', 0)
  half, third = np.sqrt([1 / 2, 1 / 3])
  want = [[half, half, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0] + [third] * 3]
  np.testing.assert_allclose(given, want, rtol=1e-6)
  shuffled = windows.concept_rows(genes, 'shuffled', 0)
  np.testing.assert_allclose(shuffled @ shuffled.T, given @ given.T, atol=1e-6)
  random = windows.concept_rows(genes, 'random', 0)
  np.testing.assert_allclose((random > 0).sum(1), [2, 1, 3])
  for rows in (shuffled, random):
    assert np.abs(rows - given).max() > 0.1


def test_a_run_is_tested_on_the_patient_it_left_out(config):
  config.contact.update(
    inputs=('expression',), models=('gated_abmil',), concepts=('given',),
    window=3,
  )  # fmt: skip
  study = a_study(('A1', 'A2', 'B1', 'C1'))
  parts = contact.make_parts(config, study)
  assert list(parts) == [
    'contact_expression_gated_abmil', 'contact_concepts_given',
  ]  # fmt: skip
  task = contact.make_task(config, study, 'expression')
  assert task.folds == ('A', 'B', 'C')
  places = [task.sections[w.section] for w in task.windows]
  part = parts['contact_concepts_given']
  assert part.runs == 6
  data = part.data
  resident = jax.tree.map(jnp.asarray, data.resident)
  load = data.load(0, slice(0, data.batch_size))
  for run in range(part.runs):
    used = load['index'][run][load['weight'][run] > 0]
    held = task.folds[run % 3]
    assert held not in {places[i][0] for i in used}
    batch = jax.tree.map(lambda x, run=run: x[run], load)
    found = data.gather(resident, batch)
    index = load['index'][run]
    np.testing.assert_array_equal(
      found['bag'].features, task.features[index, run % 3]
    )
    np.testing.assert_array_equal(found['bag'].concepts, task.concepts[index])
  tested = part.evaluations['test'].load(0, slice(0, 64))
  for run in range(part.runs):
    seen = tested['index'][run][tested['weight'][run] > 0]
    assert {places[i][0] for i in seen} == {task.folds[run % 3]}
  # Contact is an edge of a window's graph between the two kinds.
  kinds = contact.make_task(config, study, 'kinds').features[:, 0].argmax(-1)
  graph = task.bag.graph
  for i, window in enumerate(task.windows):
    size = len(window.spots)
    pairs = {
      (kinds[i, a], kinds[i, b])
      for a in range(size)
      for b, real in zip(graph.nbr[i, a], graph.emask[i, a], strict=True)
      if real
    }
    assert ((1, 2) in pairs) == window.touch


def test_auc_within_sections_by_hand():
  places = np.array([0, 0, 0, 1, 1, 2, 2])
  labels = np.array([1, 0, 0, 1, 0, 1, 1])
  scores = np.array([5.0, 6.0, 1.0, 0.2, 0.1, 9.0, 9.0])
  # 1/2 of three windows, 1 of two; section 2 has one label.
  found = report.within_auroc(places, labels, scores)
  np.testing.assert_allclose(found, (0.5 * 3 + 1 * 2) / 5)
  assert np.isnan(report.within_auroc(places[5:], labels[5:], scores[5:]))


def test_composition_tells_nothing_where_it_is_matched(config):
  config.contact.window = 3
  task = contact.make_task(config, a_study(('A1', 'B1', 'C1', 'D1')), 'kinds')
  scores = report.composition_scores(task)
  judge = report._Comparison(task, 3, 200)
  assert len(task.windows) > 20
  seen = judge.interval(scores, np.zeros(len(scores)))
  # All windows are full, so that nothing but the matched counts is left.
  assert seen.value == pytest.approx(0, abs=1e-9)
  perfect = judge.interval(judge.labels.astype(float), scores)
  assert perfect.value == pytest.approx(0.5)
  assert auroc(judge.labels, scores) == pytest.approx(0.5)


def test_weighted_samples_are_those_of_repeated_windows(config):
  config.contact.window = 3
  task = contact.make_task(config, a_study(('A1', 'B1', 'C1', 'D1')), 'kinds')
  judge = report._Comparison(task, 3, 5)
  scores = np.random.default_rng(0).integers(0, 4, len(task.windows)) * 1.0
  found = judge._aucs(scores)
  for times, value in zip(judge._times.astype(int), found, strict=True):
    rows = np.repeat(np.arange(len(scores)), times)
    want = report.within_auroc(
      judge.places[rows], judge.labels[rows], scores[rows]
    )
    np.testing.assert_allclose(value, want, rtol=1e-12)


def test_wrong_fields_and_too_few_windows(config):
  for field in ('inputs', 'concepts'):
    wrong = config.copy_and_resolve_references()
    wrong.contact[field] = ('nonsense',)
    with pytest.raises(ValueError, match=rf'contact\.{field}.*nonsense'):
      contact.make_parts(wrong, a_study())
  assert contact.make_task(config, a_study(('A1', 'A2')), 'kinds') is None
