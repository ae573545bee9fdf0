import numpy as np
import pytest

from tests.data.slides.support import (
  features_of,
  grid_coords,
  write_clam,
  write_csv,
)
from tmlib.data.slides import (
  CohortError,
  ScanRow,
  Split,
  apply_split,
  check_cohort,
  find_slides,
  join_slides,
  merge_moments,
  read_labels,
  read_survival,
  scan_slides,
)


def folder_of(tmp_path, names, dim=4):
  for i, name in enumerate(names):
    n = 6
    write_clam(
      tmp_path / f'{name}.h5', features_of(n, dim, i), grid_coords(2, 3)
    )
  return tmp_path


def labelled(tmp_path, rows, header='case_id,slide_id,label'):
  return read_labels(write_csv(tmp_path / 'labels.csv', header, rows))


def checked(cohort, **options):
  scan = scan_slides([path for files in cohort.files for path in files])
  return check_cohort(cohort, scan, **options)


def test_clam_layout_prefers_files_with_positions(tmp_path):
  folder_of(tmp_path / 'h5_files', ['a', 'b'])
  np.save(tmp_path / 'x.txt.npy', np.zeros(3))  # beside, not below
  (tmp_path / 'x.txt.npy').unlink()
  (tmp_path / 'pt_files').mkdir()
  (tmp_path / 'pt_files' / 'a.pt').write_bytes(b'')
  (tmp_path / 'pt_files' / 'c.pt').write_bytes(b'')
  found = find_slides(tmp_path)
  assert {k: v.name for k, v in found.items()} == {
    'a': 'a.h5', 'b': 'b.h5', 'c': 'c.pt',
  }  # fmt: skip


def test_trident_layout_and_its_patches(tmp_path):
  job = tmp_path / '20x_256px_0px_overlap'
  folder_of(job / 'features_uni_v1', ['a', 'b'])
  folder_of(job / 'patches', ['a_patches'])
  assert list(find_slides(tmp_path)) == ['a', 'b']
  folder_of(job / 'features_conch_v1', ['a'])
  with pytest.raises(ValueError, match='several sets.*features_conch_v1.*uni'):
    find_slides(tmp_path)


def test_folders_by_patient(tmp_path):
  folder_of(tmp_path / 'p0', ['a'])
  folder_of(tmp_path / 'p1', ['b.svs'])
  assert list(find_slides(tmp_path)) == ['a', 'b']


def test_wrong_folders(tmp_path):
  folder_of(tmp_path / 'features', ['a'])
  with pytest.raises(FileNotFoundError, match='did you mean .*features'):
    find_slides(tmp_path / 'featurs')
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'empty' / 'x.svs').touch()
  with pytest.raises(FileNotFoundError, match=r'no feature file.*x\.svs'):
    find_slides(tmp_path / 'empty')
  with pytest.raises(ValueError, match='is a file'):
    find_slides(tmp_path / 'features' / 'a.h5')
  folder_of(tmp_path / 'features', ['a.svs'])
  with pytest.raises(ValueError, match="both slide 'a'"):
    find_slides(tmp_path / 'features')


def test_missing_and_extra_are_listed_by_name(tmp_path):
  files = find_slides(folder_of(tmp_path / 'f', ['a', 'b', 'd']))
  table = labelled(
    tmp_path, [('p', 'a.svs', 'x'), ('q', 'b', 'y'), ('r', 'c', 'y')]
  )
  cohort = join_slides(table, files)
  assert cohort.names == ('a', 'b')
  assert cohort.cases == ('p', 'q')
  assert cohort.findings == (
    '1 of 3 rows of the table have no feature file: c',
    '1 of 3 feature files are not in the table: d',
  )
  with pytest.raises(CohortError, match='none of the 3 ids.*a, b.*folder z'):
    join_slides(table, {'z': tmp_path / 'z.h5'})


def test_patients_hold_all_their_slides(tmp_path):
  files = find_slides(
    folder_of(tmp_path / 'f', ['TCGA-AA-1-01', 'TCGA-AA-1-02', 'TCGA-BB-10-1'])
  )
  path = write_csv(
    tmp_path / 't.csv',
    'case_id,survival_months,censorship',
    [('TCGA-AA-1', 3, 0), ('TCGA-BB-10', 4, 1), ('TCGA-BB-1', 9, 0)],
  )
  cohort = join_slides(read_survival(path), files, 'patient')
  assert cohort.names == ('TCGA-AA-1', 'TCGA-BB-10')
  assert [len(f) for f in cohort.files] == [2, 1]
  assert cohort.sites == ('AA', 'BB')
  assert cohort.values['event'].tolist() == [True, False]
  assert 'TCGA-BB-1' in cohort.findings[0]


def test_a_patient_of_two_labels(tmp_path):
  files = find_slides(folder_of(tmp_path / 'f', ['a', 'b']))
  table = labelled(tmp_path, [('p', 'a', 'x'), ('p', 'b', 'y')])
  assert join_slides(table, files).names == ('a', 'b')
  with pytest.raises(CohortError, match=r'patient p have label x \(a\) and y'):
    join_slides(table, files, 'patient')


def test_empty_broken_and_nan_slides(tmp_path):
  folder = folder_of(tmp_path / 'f', ['a', 'b', 'c', 'd'])
  write_clam(folder / 'b.h5', np.zeros((0, 4), np.float32), np.zeros((0, 2)))
  nan = features_of(6)
  nan[2, 1], nan[4, 0] = np.nan, np.inf
  write_clam(folder / 'c.h5', nan, grid_coords(2, 3))
  (folder / 'd.h5').write_bytes(b'broken')
  table = labelled(tmp_path, [(x, x, 'x') for x in 'abcd'])
  cohort = join_slides(table, find_slides(folder))
  with pytest.raises(CohortError, match=r'1 of 4 feature files.*d\.h5'):
    checked(cohort)
  (folder / 'd.h5').unlink()
  cohort = join_slides(table, find_slides(folder))
  with pytest.raises(CohortError, match=r'c\.h5 in 2 of 6 patches'):
    checked(cohort)
  (folder / 'd.h5').write_bytes(b'broken')
  cohort = checked(join_slides(table, find_slides(folder)), incomplete='skip')
  assert cohort.names == ('a',)
  text = '\n'.join(cohort.findings)
  assert '1 of 4 files cannot be read and are left out: d' in text
  assert '1 of 4 slides hold NaN and are left out: c' in text
  assert '1 of 4 slides are empty and are left out: b' in text


def test_several_sizes_and_a_wrong_encoder(tmp_path):
  folder = folder_of(tmp_path / 'f', ['a', 'b', 'c'], dim=1024)
  table = labelled(tmp_path, [(x, x, 'x') for x in 'abc'])
  cohort = join_slides(table, find_slides(folder))
  assert checked(cohort, encoder='uni').names == ('a', 'b', 'c')
  with pytest.raises(CohortError, match=r'1024 \(as of .*uni.*makes 768'):
    checked(cohort, encoder='ctranspath')
  with pytest.raises(CohortError, match="encoder 'unni' is unknown"):
    checked(cohort, encoder='unni')
  folder_of(folder, ['b'], dim=768)
  with pytest.raises(CohortError, match=r'1024 in 2 slides but 768 \(as of'):
    checked(cohort)


def test_positions_that_repeat_or_lie_on_no_grid_are_told(tmp_path):
  folder = folder_of(tmp_path / 'f', ['a'])
  twice = grid_coords(2, 3)
  twice[5] = twice[0]
  write_clam(folder / 'b.h5', features_of(6), twice)
  rng = np.random.default_rng(0)
  write_clam(folder / 'c.h5', features_of(6), rng.integers(0, 9999, (6, 2)))
  write_clam(folder / 'd.h5', features_of(6))
  table = labelled(tmp_path, [(x, x, 'x') for x in 'abcd'])
  text = '\n'.join(checked(join_slides(table, find_slides(folder))).findings)
  assert '1 of 4 slides have patches on one position' in text
  assert '1 of 4 slides have patches on no grid' in text
  assert '1 of 4 slides have no positions: d' in text


def cohort_of(tmp_path):
  files = find_slides(folder_of(tmp_path / 'f', ['a', 'b', 'c', 'd']))
  rows = [('p', 'a', 'x'), ('p', 'b', 'x'), ('q', 'c', 'y'), ('r', 'd', 'y')]
  return join_slides(labelled(tmp_path, rows), files)


def test_splits_by_slide_and_by_patient(tmp_path):
  cohort = cohort_of(tmp_path)
  parts, findings = apply_split(cohort, Split('s', ('a', 'b'), (), ('c', 'z')))
  assert {k: v.tolist() for k, v in parts.items()} == {
    'train': [0, 1], 'test': [2],
  }  # fmt: skip
  assert findings == ('1 of 4 ids of s have no bag: z',
                      '1 of 4 bags are not in s: d')  # fmt: skip
  parts, findings = apply_split(cohort, Split('s', ('p',), ('q', 'r')))
  assert parts['train'].tolist() == [0, 1]
  assert parts['val'].tolist() == [2, 3]
  assert not findings


def test_leakage_is_an_error(tmp_path):
  with pytest.raises(
    CohortError, match=r'patient p is in train \(a\) and in test \(b\)'
  ):
    apply_split(cohort_of(tmp_path), Split('s', ('a', 'c'), (), ('b', 'd')))
  with pytest.raises(CohortError, match="no bag of the part 'val'"):
    apply_split(cohort_of(tmp_path), Split('s', ('a', 'b'), ('no', 'nope')))


def test_moments_of_any_fold_without_reading_again(tmp_path):
  folder = tmp_path / 'f'
  tables = {}
  for i, (name, n) in enumerate([('a', 5), ('b', 5000), ('c', 1)]):
    tables[name] = 100 + 3 * features_of(n, 3, i)
    tables[name][:, 2] = 7
    write_clam(folder / f'{name}.h5', tables[name])
  files = find_slides(folder)
  scan = scan_slides(list(files.values()))
  for chosen in ('ab', 'abc', 'c'):
    mean, std = merge_moments([scan[files[x]] for x in chosen])
    every = np.concatenate([tables[x] for x in chosen]).astype(np.float64)
    np.testing.assert_allclose(mean, every.mean(0), rtol=1e-6)
    want = every.std(0)
    np.testing.assert_allclose(std, np.where(want == 0, 1, want), rtol=1e-5)
  with pytest.raises(ValueError, match='no patch'):
    merge_moments([ScanRow()])


def test_a_kept_scan_is_repeated_for_changed_files_only(tmp_path):
  folder = folder_of(tmp_path / 'f', ['a', 'b'])
  files = list(find_slides(folder).values())
  cache = tmp_path / 'scan.npz'
  first = scan_slides(files, cache=cache)
  kept = cache.stat().st_mtime_ns
  again = scan_slides(files, cache=cache)
  assert cache.stat().st_mtime_ns == kept
  for path in files:
    np.testing.assert_array_equal(first[path].mean, again[path].mean)
    assert first[path][:9] == again[path][:9]
  write_clam(files[1], features_of(2, 5), grid_coords(1, 2))
  changed = scan_slides(files, cache=cache)
  assert (changed[files[1]].num_patches, changed[files[1]].dim) == (2, 5)
  np.testing.assert_array_equal(changed[files[0]].mean, first[files[0]].mean)
  cache.write_bytes(b'broken')
  assert scan_slides(files, cache=cache)[files[1]].dim == 5


def test_headers_only(tmp_path):
  files = list(find_slides(folder_of(tmp_path / 'f', ['a'])).values())
  np.savez(
    tmp_path / 'f' / 'n.npz', features=features_of(3), coords=np.eye(3, 2)
  )
  np.save(tmp_path / 'f' / 'm.npy', features_of(2))
  files += [tmp_path / 'f' / 'n.npz', tmp_path / 'f' / 'm.npy']
  scan = scan_slides(files, full=False)
  assert [r.num_patches for r in scan.values()] == [6, 3, 2]
  assert [r.has_coords for r in scan.values()] == [True, True, False]
  assert all(r.mean is None for r in scan.values())
