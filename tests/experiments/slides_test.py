"""configs/slides.py, as a new user meets it."""

import csv
import json
import pathlib

import jax
import numpy as np
import pytest

from experiments import (
  cli,
  slides,
  slides_cohort,
  slides_predict,
  slides_report,
)
from tests.data.slides.support import (
  features_of,
  grid_coords,
  write_clam,
  write_csv,
)
from tmlib import train
from tmlib.data.slides import Cohort

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / 'configs' / 'slides.py'
LABELS = ('Lung adeno', 'normal')


def write_slides(folder, count, dim=5, seed=0):
  """Slides of 6 to 15 patches; those of odd number are shifted."""
  for i in range(count):
    rows = 2 + i % 4
    features = features_of(3 * rows, dim, seed + i) + 2 * (i % 2)
    write_clam(folder / f's{i}.h5', features, grid_coords(rows, 3))
  return folder


def write_labels(path, count):
  rows = [
    (f'p{i // 2}{i % 2}', f's{i}.svs', LABELS[i % 2]) for i in range(count)
  ]
  return write_csv(path, 'case_id,slide_id,label', rows)


def tiny(features, labels, **fields):
  config = cli.load_config(f'{CONFIG}:tiny')
  config.data.synthetic = 0
  config.data.features, config.data.labels = str(features), str(labels)
  config.report.heatmaps = 2
  config.update_from_flattened_dict(fields)
  return config


def run(config, workdir):
  make = lambda config: slides.make(config, workdir)
  return train.run(make, config, workdir=workdir)


@pytest.fixture(name='trained', scope='module')
def trained_fixture(tmp_path_factory):
  root = tmp_path_factory.mktemp('subtype')
  features = write_slides(root / 'features', 10)
  labels = write_labels(root / 'labels.csv', 11)  # s10 has no file
  config = tiny(features, labels)
  assert run(config, root / 'run') == 0
  return root, config


def test_every_bag_is_tested_once_by_a_model_that_did_not_see_it(trained):
  root, config = trained
  study = slides_cohort.load_study(config, root / 'run')
  tested = []
  for fold in study.folds:
    with (root / 'run' / fold.name / 'predictions.csv').open() as file:
      names = [row['name'] for row in csv.DictReader(file)]
    assert sorted(names) == sorted(study.cohort.names[i] for i in fold.test)
    assert not set(fold.test) & set(fold.train)
    tested += names
  assert sorted(tested) == [f's{i}' for i in range(10)]
  missing, pitch = study.findings
  assert missing == '1 of 11 rows of the table have no feature file: s10'
  assert pitch.startswith('10 of 10 slides do not store their pitch')


def test_the_report(trained):
  root, _ = trained
  out = root / 'run' / 'report'
  text = (out / 'table.md').read_text()
  assert 'AUROC, pooled: ' in text
  assert '1 of 11 rows of the table have no feature file: s10' in text
  with (out / 'folds.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['fold'] for row in rows] == ['fold_0', 'fold_1']
  assert {'auroc', 'balanced_accuracy', 'macro_f1', 'cohen_kappa'} <= set(
    rows[0]
  )
  pictures = {'roc.png', 'confusion.png'}
  assert pictures <= {path.name for path in out.iterdir()}
  assert len(list((out / 'heatmaps').glob('*.png'))) == 2


def test_folds_share_their_programs(trained):
  root, _ = trained
  programs = [x.name for x in (root / 'run' / 'compiled').glob('jit_one-*')]
  # All bags fit one bucket: a step and an evaluation, for both folds.
  assert len(programs) == 2


def test_a_prediction_is_what_the_loop_evaluated(trained):
  root, _ = trained
  predictor = slides_predict.Predictor(root / 'run', [1])
  with (root / 'run' / 'fold_1' / 'predictions.csv').open() as file:
    rows = list(csv.DictReader(file))
  for row in rows[:3]:
    path = root / 'features' / f'{row["name"]}.h5'
    found = predictor(predictor.reader([(path,)]).read(0))
    want = [float(row['probability_0']), float(row['probability_1'])]
    np.testing.assert_allclose(found['outputs'][0], want, atol=1e-5)
    assert abs(found['attention'].sum() - 1) < 1e-5


def test_new_slides_without_labels(trained):
  root, config = trained
  new = write_slides(root / 'new', 2, seed=50)
  write_clam(new / 'void.h5', np.zeros((0, 5), np.float32), np.zeros((0, 2)))
  # What was trained counts, not what is typed now.
  again = cli.load_config(str(CONFIG))
  again.predict.features = str(new)
  assert slides.predict(again, root / 'run') == 0
  out = root / 'run' / 'predict'
  with (out / 'predictions.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['slide_id'] for row in rows] == ['s0', 's1']
  for row in rows:
    shares = [float(row[f'probability_{name}']) for name in LABELS]
    assert abs(sum(shares) - 1) < 1e-4
    assert row['prediction'] == LABELS[int(np.argmax(shares))]
  tiles = json.loads((out / 'heatmaps' / 's0.geojson').read_text())['features']
  assert len(tiles) == 6
  assert tiles[0]['geometry']['coordinates'][0][2] == [768, 1280]
  del config


def test_slides_of_a_patient_are_averaged():
  none = ('',) * 4
  cohort = Cohort(none, ('p', 'q', 'p', 'q'), none, ((),) * 4, {})
  one = {
    'id': np.array([1, 2, 0]), 'time': np.array([4.0, 3, 3]),
    'event': np.array([0.0, 1, 1]), 'risk': np.array([1.0, 5, 2]),
    'probability': np.array([[1.0, 0], [0.4, 0.6], [0, 1]]),
  }  # fmt: skip
  found = slides_report._by_patient(cohort, one)
  assert found['time'].tolist() == [3, 4]
  assert found['risk'].tolist() == [3.5, 1]
  np.testing.assert_allclose(found['probability'], [[0.2, 0.8], [1, 0]])
  # No time of the patient where their slides have two; nothing to average.
  assert not slides_report._by_patient(cohort, one | {'time': np.arange(3)})
  single = cohort._replace(cases=('p', 'q', 'r', 's'))
  assert not slides_report._by_patient(single, one)


def test_predicting_what_does_not_fit_is_named(trained, tmp_path):
  root, _ = trained
  config = cli.load_config(str(CONFIG))
  with pytest.raises(ValueError, match='predict.features is empty'):
    slides.predict(config, root / 'run')
  config.predict.features = str(write_slides(tmp_path / 'wrong', 1, dim=7))
  with pytest.raises(ValueError, match='dim 7 but the models .* on 5'):
    slides.predict(config, root / 'run')
  with pytest.raises(FileNotFoundError, match='train there first'):
    slides.predict(config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('task', 'model', 'words'),
  [
    ('survival_nll', 'clam_sb', ['Log-rank', 'c_index_ipcw', 'C-index']),
    ('survival_nll', 'dsmil', ['C-index', 'Log-rank']),
    ('survival_cox', 'tmevolve', ['C-index', 'Log-rank']),
    ('survival_cox', 'dtfd', ['C-index', 'Log-rank']),
    ('expression', 'gated_abmil', ['pearson', 'constant_genes']),
  ],
)
def test_other_tasks_end_to_end(tmp_path, task, model, words):
  config = cli.load_config(f'{CONFIG}:tiny')
  config.task, config.model, config.loss.bins = task, model, 2
  config.data.synthetic = 24
  assert run(config, tmp_path) == 0
  text = (tmp_path / 'report' / 'table.md').read_text()
  assert all(word in text for word in words)
  new = cli.load_config(str(CONFIG))
  new.predict.features = str(tmp_path / 'synthetic' / 'features')
  assert slides.predict(new, tmp_path) == 0
  with (tmp_path / 'predict' / 'predictions.csv').open() as file:
    rows = list(csv.DictReader(file))
  column = 'G1' if task == 'expression' else 'risk'
  assert len(rows) == 24
  assert np.isfinite([float(row[column]) for row in rows]).all()


@pytest.mark.slow
def test_an_untrained_zero_shot_model_is_cosines_with_named_texts(tmp_path):
  features = write_slides(tmp_path / 'f', 8)
  labels = write_labels(tmp_path / 'l.csv', 8)
  rng = np.random.default_rng(0)
  texts = {name: rng.normal(size=5) for name in reversed(LABELS)}
  np.savez(tmp_path / 't.npz', **texts)
  config = tiny(
    features, labels, model='zero_shot', epochs=0, min_steps=0,
    **{'data.text': str(tmp_path / 't.npz'), 'train.steps': 0},
  )  # fmt: skip
  config.report.heatmaps = 0
  assert run(config, tmp_path / 'run') == 0
  predictor = slides_predict.Predictor(tmp_path / 'run', [0])
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  for i in range(3):
    reader = predictor.reader([(features / f's{i}.h5',)])
    found = predictor(reader.read(0))['outputs'][0]
    x = unit(reader.slides(0)[0].features)
    cosine = np.stack([x @ unit(texts[name]) for name in LABELS], 1)
    odds = np.exp(cosine.mean(0) / 0.07)
    np.testing.assert_allclose(found, odds / odds.sum(), atol=1e-5)


def test_texts_that_do_not_fit_are_named(good):
  root, features, labels = good
  np.save(root / 't.npy', np.ones((3, 5)))
  np.savez(root / 't.npz', a=np.ones(5), b=np.ones(5))
  (root / 't.csv').write_text('1')
  for fields, match in (
    ({'model': 'vila_mil'}, r"'vila_mil' needs --config\.data\.text=FILE"),
    ({'model': 'abmil', 'data.text': 't.npy'}, "'abmil' reads no text"),
    ({'model': 'vila_mil', 'data.text': 't.npy'}, r'shape \(3, 5\), expected'),
    ({'model': 'vila_mil', 'data.text': 't.npz'}, 'holds a, b; .* normal'),
    ({'model': 'vila_mil', 'data.text': 't.csv'}, r'from \.npy, \.npz or'),
    ({'model': 'vila_mil', 'data.text': 'u.npy'}, r'data\.text: no file'),
  ):
    if 'data.text' in fields:
      fields['data.text'] = str(root / fields['data.text'])
    with pytest.raises((ValueError, OSError), match=match) as error:
      slides.make(tiny(features, labels, **fields), root / 'run')
    assert cli.is_expected(error.value)


@pytest.mark.slow
@pytest.mark.parametrize('model', ['tmevolve', 'clam_sb', 'dsmil', 'transmil'])
def test_models_by_name(tmp_path, model):
  config = cli.load_config(f'{CONFIG}:tiny')
  config.model, config.data.max_patches = model, 20
  assert run(config, tmp_path) == 0
  assert (tmp_path / 'report' / 'table.md').is_file()


@pytest.mark.slow
def test_a_signal_is_found(tmp_path):
  """Slides whose patches are shifted by two standard deviations."""
  features = write_slides(tmp_path / 'f', 24)
  labels = write_labels(tmp_path / 'l.csv', 24)
  config = tiny(features, labels, **{'train.steps': 60})
  config.optimizer.learning_rate = 1e-2
  run(config, tmp_path / 'run')
  with (tmp_path / 'run' / 'report' / 'folds.csv').open() as file:
    assert min(float(r['auroc']) for r in csv.DictReader(file)) > 0.95


@pytest.fixture(name='good')
def good_fixture(tmp_path):
  features = write_slides(tmp_path / 'features', 6)
  return tmp_path, features, write_labels(tmp_path / 'labels.csv', 6)


@pytest.mark.parametrize(
  ('fields', 'match'),
  [
    ({'data.features': ''}, r'data\.features is empty; pass --config'),
    ({'data.labels': ''}, r'data\.labels is empty'),
    ({'data.features': 'featurs'}, r'^data\.features: no folder'),
    ({'data.labels': 'none.csv'}, r'^data\.labels: no table at'),
    ({'task': 'subtyping'}, "task='subtyping' must be one of subtype"),
    ({'task': 'survival_nll'}, r'data\.labels: .*no column survival_months'),
    ({'model': 'tmevolv'}, r"model: unknown model 'tmevolv'; did you mean"),
    ({'data.label_column': 'x'}, "no column 'x'.*has case_id, slide_id, label"),
    ({'data.label_column': 'slide_id'}, 'different labels|fewer than'),
    ({'data.encoder': 'uni'}, r"dim 5 but encoder 'uni' makes 1024"),
    ({'data.folds': 4}, r"class 'Lung adeno' has 3 patients, fewer than"),
    ({'data.preserve_sites': True}, r'data\.folds: 6 of 6 bags have no site'),
    ({'data.graph': 'none', 'model': 'tmevolve'}, "graph='none' but model"),
    ({'data.sampler': 'events'}, 'needs a survival task'),
    ({'train.runs': 3}, 'train.runs=3'),
    ({'network.options': ('gated',)}, 'must look like name=value'),
    ({'network.options': ('gatd=True',)}, "no option 'gatd'; did you mean"),
    ({'data.splits': 'none.csv'}, r'^data\.splits: no table at'),
    ({'data.folds': 1}, r'data\.folds=1 must be at least 2'),
    ({'data.max_patches': -1}, r'data\.max_patches=-1 must be at least 0'),
    ({'train.batch_size': 0}, r'train\.batch_size=0 must be at least 1'),
    ({'epochs': -1}, 'epochs=-1 must be at least 0'),
    ({'loss.label_smoothing': 1.0}, r'loss\.label_smoothing=1\.0 must be in'),
    ({'loss.alpha': 1.5}, r'loss\.alpha=1\.5 must be in \[0, 1\]'),
    ({'network.dropout': 1.0}, r'model: dropout=1\.0 must be in \[0, 1\)'),
    ({'network.hidden': 0}, 'model: hidden=0 must be an integer >= 1'),
  ],
)
def test_mistakes_name_field_value_and_fix(good, monkeypatch, fields, match):
  root, features, labels = good
  monkeypatch.chdir(root)
  config = tiny(features, labels, **fields)
  with pytest.raises((ValueError, OSError), match=match) as error:
    slides.make(config, root / 'run')
  assert cli.is_expected(error.value)


def test_a_mistake_is_one_line(good, capsys):
  _, features, labels = good
  config = tiny(str(features) + 'x', labels)
  with pytest.raises(SystemExit) as stop:
    cli.guard(lambda: slides.make(config), False)
  assert stop.value.code == 2
  (line,) = capsys.readouterr().err.strip().splitlines()
  assert line.startswith('error: ')
  assert 'did you mean' in line


@pytest.mark.parametrize(
  ('rows', 'match'),
  [
    ([('a', 's0', 'x'), ('b', 's1', 'x')], "all 2 bags have label 'x'"),
    ([('a', 's0', 'x')], "all 1 bags have label 'x'"),
    (
      [(i, f's{i}', 0.1 * i) for i in range(6)],
      'data.labels: 6 different labels for 6 bags.*--config.task=expression',
    ),
    ([('a', 's0', 'x'), ('b', 's0', 'y')], 's0 appears twice'),
    ([('a', 's0', 'x'), ('b', 's1', '')], 'line 3: label is empty'),
    (
      [(i, f's{i}', x) for i, x in enumerate(['x', 'y', 'X', 'y', 'x', 'X'])],
      "'X' and 'x' differ in case",
    ),
    ([('a', 'q', 'x'), ('b', 'r', 'y')], 'none of the 2 ids .* s0, s1'),
  ],
)
def test_bad_labels(good, rows, match):
  root, features, _ = good
  path = write_csv(root / 'bad.csv', 'case_id,slide_id,label', rows)
  with pytest.raises(ValueError, match=match):
    slides.make(tiny(features, path), root / 'run')


def test_nan_and_mixed_sizes(good):
  root, features, labels = good
  bad = features_of(6, 5)
  bad[1, 2] = np.nan
  write_clam(features / 's1.h5', bad, grid_coords(2, 3))
  with pytest.raises(ValueError, match=r'1 of 6 slides hold NaN.*s1\.h5'):
    slides.make(tiny(features, labels), root / 'run')
  config = tiny(features, labels, **{'data.incomplete': 'skip'})
  study = slides_cohort.load_study(config, root / 'run')
  assert 's1' not in study.cohort.names
  write_clam(features / 's1.h5', features_of(6, 9), grid_coords(2, 3))
  with pytest.raises(ValueError, match='several sizes: 5 in 5 .* 9 in 1'):
    slides.make(tiny(features, labels), root / 'run')


def test_a_model_of_graphs_needs_positions(good):
  root, features, labels = good
  write_clam(features / 's1.h5', features_of(6, 5))
  config = tiny(features, labels, model='tmevolve')
  with pytest.raises(ValueError, match=r'--config\.data\.graph=knn'):
    slides.make(config, root / 'run')
  config.data.graph = 'knn'
  assert slides.graph_of(config, False) == 'knn'
  config.data.graph, config.tmevolve.steps = 'auto', 0
  assert slides.graph_of(config, False) == 'none'


def test_leakage_across_given_splits(good):
  root, features, labels = good
  text = labels.read_text().replace('p01', 'p00')
  labels.write_text(text)
  splits = write_csv(
    root / 'splits_0.csv', ',train,val', [(0, 's0', 's1'), (1, 's2', 's3')]
  )
  config = tiny(features, labels, **{'data.splits': str(splits)})
  with pytest.raises(
    ValueError, match=r'data\.splits: .*p00 is in train \(s0\) and in val'
  ):
    slides.make(config, root / 'run')


def test_all_censored_and_bins(good, caplog):
  root, features, _ = good
  header = 'case_id,slide_id,survival_months,censorship'
  rows = [(f'p{i}', f's{i}', i + 1, 1) for i in range(6)]
  path = write_csv(root / 'all.csv', header, rows)
  config = tiny(features, path, task='survival_nll')
  with pytest.raises(ValueError, match='all patients are censored'):
    slides.make(config, root / 'run')
  rows = [(f'p{i}', f's{i}', i + 1, 0) for i in range(6)]
  path = write_csv(root / 'few.csv', header, rows)
  config = tiny(features, path, task='survival_nll', **{'loss.bins': 9})
  with pytest.raises(ValueError, match=r'loss\.bins: num_bins=9'):
    slides.make(config, root / 'run')
  rows = [(f'p{i}', f's{i}', i, int(i > 0)) for i in range(6)]
  path = write_csv(root / 'one.csv', header, rows)
  config = tiny(features, path, task='survival_cox')
  with pytest.raises(ValueError, match=r'all 3 training patients.*data\.folds'):
    slides.make(config, root / 'run')
  assert '1 of 6 bags have a follow-up time of zero: p0' in caplog.text


def test_a_stream_may_be_lengthened_and_reads_what_it_did(good):
  root, features, labels = good
  loads = []
  for steps in (4, 7):
    config = tiny(
      features, labels,
      **{'train.steps': steps, 'data.max_patches': 7, 'train.batch_size': 2,
         'train.mesh': (1, 1, 1)},
    )  # fmt: skip
    part = slides.make(config, root / 'run').parts['fold_0']
    batch = part.data.load(3, slice(0, 2))
    loads.append((part.data.fingerprint, batch))
  assert loads[0][0] == loads[1][0]
  jax.tree.map(np.testing.assert_array_equal, loads[0][1], loads[1][1])
  assert loads[0][1]['bag'].mask.sum(1).max() == 7
