import gzip
import os
import pathlib
import zipfile

import numpy as np
import pytest

from tests.data.slides.support import write_csv
from tmlib.data.slides import (
  TableError,
  clean_id,
  read_labels,
  read_splits,
  read_survival,
  read_table,
  read_targets,
)

TCGA = (
  pathlib.Path(
    os.environ.get(
      'TMLIB_SHARED', pathlib.Path(__file__).resolve().parents[4] / 'shared'
    )
  )
  / 'data/tcga'
)


def test_clam_labels(tmp_path):
  path = write_csv(
    tmp_path / 'a.csv',
    'case_id,slide_id,label',
    [
      ('p0', 's0.svs', 'LUAD'),
      ('p0', ' s1 ', ' Lung  adeno '),
      ('p1', 's2', 1),
    ],
  )
  table = read_labels(path)
  assert table.slides == ['s0', 's1', 's2']
  assert table.cases == ['p0', 'p0', 'p1']
  assert table.values['label'].tolist() == ['LUAD', 'Lung  adeno', '1']


def test_transmil_labels_and_split_are_one_file(tmp_path):
  path = write_csv(
    tmp_path / 'fold0.csv',
    ',train,train_label,val,val_label,test,test_label',
    [
      (0, 'a', '1.0', 'c', '0.0', 'd', '1.0'),
      (1, 'b', '0.0', '', '', 'e', '0.0'),
    ],
  )
  table = read_labels(path)
  label = dict(zip(table.slides, table.values['label'], strict=True))
  assert label == {'a': '1', 'b': '0', 'c': '0', 'd': '1', 'e': '0'}
  (split,) = read_splits(path)
  assert split == ('fold0', ('a', 'b'), ('c',), ('d', 'e'))


@pytest.mark.parametrize('separator', [';', '\t'])
def test_separators_byte_order_mark_and_quotes(tmp_path, separator):
  text = separator.join(['slide_id', 'label']) + '\r\n'
  text += separator.join(['a', f'"b{separator}c"']) + '\r\n'
  (tmp_path / 'a.csv').write_bytes(b'\xef\xbb\xbf' + text.encode())
  table = read_labels(tmp_path / 'a.csv')
  assert table.slides == ['a']
  assert table.values['label'].tolist() == [f'b{separator}c']


MCAT = [
  ('TCGA-A', 'TCGA-A-01.svs', 'XX', 10.5, 1.0),
  ('TCGA-B', 'TCGA-B-01.svs', 'YY', 3, 0),
]


def test_mcat_zip_is_read_as_a_stream_and_censorship_is_turned(tmp_path):
  write_csv(
    tmp_path / 'x.csv',
    ',case_id,slide_id,site,survival_months,censorship',
    [(i, *row) for i, row in enumerate(MCAT)],
  )
  with zipfile.ZipFile(tmp_path / 'x.csv.zip', 'w') as archive:
    archive.write(tmp_path / 'x.csv', '../dataset_csv/x.csv')
    archive.writestr('__MACOSX/../dataset_csv/._x.csv', b'\0\5')
  table = read_survival(tmp_path / 'x.csv.zip')
  assert table.values['time'].tolist() == [10.5, 3]
  assert table.values['event'].tolist() == [False, True]
  assert table.slides == ['TCGA-A-01', 'TCGA-B-01']
  assert table.sites == ['XX', 'YY']
  # Nothing was unpacked beside or above the archive.
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x.csv', 'x.csv.zip']
  assert not (tmp_path.parent / 'dataset_csv').exists()


def test_survpath_endpoints_keep_time_and_event_together(tmp_path):
  path = write_csv(
    tmp_path / 'a.csv',
    'case_id,slide_id,survival_months,survival_months_dss,censorship,'
    'censorship_dss',
    [('a', 'a1', 5, 6, 1, 0)],
  )
  assert not read_survival(path).values['event'][0]
  other = read_survival(path, time_column='survival_months_dss')
  assert other.values['time'][0] == 6
  assert other.values['event'][0]


def test_mhim_event_is_the_time(tmp_path):
  path = write_csv(
    tmp_path / 'a.csv',
    'Study,ID,Event,Status,WSI',
    [('BLCA', 'p0', 20.5, 1, 's0.svs'), ('BLCA', 'p1', 7, 0, 's1.svs')],
  )
  table = read_survival(path)
  assert table.values['time'].tolist() == [20.5, 7]
  assert table.values['event'].tolist() == [True, False]
  assert table.cases == ['p0', 'p1']
  assert table.slides == ['s0', 's1']


@pytest.mark.skipif(not TCGA.exists(), reason='no tcga in TMLIB_SHARED')
def test_the_published_stad_table_and_splits():
  table = read_survival(TCGA / 'tcga_stad.csv')
  first = dict(zip(table.cases, table.values['event'], strict=True))
  assert len(first) == 319
  # 120 events of overall survival, by the study's own column of ones.
  assert sum(first.values()) == 120
  assert table.sites[0] == '3M'
  assert not any(s.endswith('.svs') for s in table.slides)
  splits = read_splits(TCGA / 'splits_stad')
  assert [s.name for s in splits] == [f'splits_{i}' for i in range(5)]
  held_out = [x for s in splits for x in s.val]
  assert len(held_out) == len(set(held_out)) == 319
  assert all(set(s.train).isdisjoint(s.val) for s in splits)


@pytest.mark.parametrize(
  ('rows', 'match'),
  [
    ([('a', 's', -1, 0)], r'line 2: survival_months = -1 is negative'),
    ([('a', 's', 'x', 0)], r"line 2: survival_months = 'x' is no number"),
    ([('a', 's', 'inf', 0)], 'no number'),
    ([('a', 's', 1, 2)], r"line 2: censorship = '2', expected 0 or 1"),
    ([('a', 's', 1, 0.5)], 'censorship'),
    ([('a', 's', '', 0)], r'survival_months is empty \(1 of 1 rows'),
    ([('a', 's', 1, 'NaN')], 'censorship is empty'),
    ([('a', 's', 1, 0), ('a', 's', 2, 0)], 's appears twice, with time 1'),
    ([('', 's', 1, 0)], 'case_id is empty'),
    ([('a', 's', 1, 0), ('b', 's', 1, 0)], 'slide s belongs to two patients'),
  ],
)
def test_bad_survival_tables_name_column_line_and_value(tmp_path, rows, match):
  path = write_csv(
    tmp_path / 'a.csv', 'case_id,slide_id,survival_months,censorship', rows
  )
  with pytest.raises(TableError, match=match) as error:
    read_survival(path)
  assert 'a.csv' in str(error.value)


def test_rows_without_a_value_can_be_left_out(tmp_path):
  path = write_csv(
    tmp_path / 'a.csv',
    'case_id,slide_id,survival_months,censorship',
    [('a', 's', '', 0), ('b', 't', 2, 1), ('c', 'u', 2, "'--")],
  )
  with pytest.raises(TableError, match="incomplete='skip'"):
    read_survival(path)
  table = read_survival(path, incomplete='skip')
  assert table.slides == ['t']
  assert table.skipped == ('s', 'u')


def test_targets(tmp_path):
  path = write_csv(
    tmp_path / 'a.csv',
    'case_id,slide_id,note,G1,G2',
    [('p', 's', 'x', 1, 2.5), ('q', 't', 'y', 3, -1)],
  )
  table = read_targets(path)
  assert table.names == ('G1', 'G2')
  np.testing.assert_array_equal(table.values['targets'], [[1, 2.5], [3, -1]])
  assert read_targets(path, targets=('G2',)).values['targets'].shape == (2, 1)
  with pytest.raises(TableError, match="no column 'G3'.*G1, G2"):
    read_targets(path, targets=('G3',))


@pytest.mark.parametrize(
  ('text', 'match'),
  [
    ('', 'has 0 lines'),
    ('slide_id,label\n', 'has 1 lines'),
    ('slide_id,label,label\na,b,c\n', "column 'label' appears twice"),
    ('slide_id,label\na,b,c\n', 'line 2: 3 fields but the header has 2'),
    ('slide_id,label\na,\0\n', 'binary'),
    ('slide_id,name\na,b\n', 'no column label or class or target; it has'),
    ('name,label\na,b\n', 'slide_id'),
    ('slide_id,label\na,\n', 'label is empty'),
    ('slide_id,label\na,x\na,y\n', 'a appears twice, with label x and y'),
    ('slide_id,label\nb,y\n"a,x\nc,y\n', 'line 4: .*is a quote left open'),
  ],
)
def test_bad_label_tables(tmp_path, text, match):
  (tmp_path / 'a.csv').write_text(text)
  with pytest.raises(TableError, match=match):
    read_labels(tmp_path / 'a.csv')


@pytest.mark.parametrize(
  'text',
  [
    'slide_id,label\ra,x\rb,y\r',  # old Macs
    'sep=;\r\nslide_id;label\r\na;x\r\nb;y\r\n',  # Excel
    'slide_id,label\na,x,\nb,y,,\n',
    '"slide_id";"label";"a, b, c, d"\na;x;1\nb;y;2\n',
    '\n\nslide_id\tlabel\n\na\tx\n\t\nb\ty\n',
  ],
)
def test_what_spreadsheets_write(tmp_path, text):
  (tmp_path / 'a.csv').write_text(text, newline='')
  table = read_labels(tmp_path / 'a.csv')
  assert table.slides == ['a', 'b']
  assert table.values['label'].tolist() == ['x', 'y']


@pytest.mark.parametrize('index', ['', 'Unnamed: 0'])
def test_the_index_of_pandas_is_nothing_else(tmp_path, index):
  rows = [(i, f'p{i}', i % 2, 2.5, 7 + i) for i in range(3)]
  header = f'{index},case_id,label,survival_months,censorship'
  path = write_csv(tmp_path / 'a.csv', header, [r[:4] + (0,) for r in rows])
  for table in (read_labels(path), read_survival(path)):
    assert table.cases == ['p0', 'p1', 'p2']
    assert table.slides == table.sites == ['', '', '']
  header = f'{index},slide_id,site,G1,age'
  path = write_csv(tmp_path / 'b.csv', header, rows)
  assert read_targets(path).names == ('G1', 'age')


@pytest.mark.parametrize(
  ('column', 'turned'),
  [
    ('is_censored', True), ('Censor', True), ('uncensored', False),
    ('not_censored', False), ('died', False),
  ],
)  # fmt: skip
def test_who_is_censored_is_read_from_the_name(tmp_path, column, turned):
  rows = [('p', 3, 'yes'), ('q', 4, 'no')]
  path = write_csv(tmp_path / 'a.csv', f'case_id,time,{column}', rows)
  event = read_survival(path, event_column=column).values['event']
  assert event.tolist() == [not turned, turned]


def test_rows_that_agree_are_one(tmp_path):
  path = write_csv(
    tmp_path / 'a.csv', 'slide_id,label', [('a', 'x'), ('a', 'x'), ('b', 'y')]
  )
  table = read_labels(path)
  assert table.slides == ['a', 'b']
  assert table.repeated == ('a',)


def test_packed_tables_and_wrong_paths(tmp_path):
  raw = b'slide_id,label\na,x\n'
  (tmp_path / 'a.csv.gz').write_bytes(gzip.compress(raw))
  assert read_labels(tmp_path / 'a.csv.gz').slides == ['a']
  (tmp_path / 'b.csv.gz').write_bytes(gzip.compress(raw)[:-9])
  (tmp_path / 'c.csv').write_bytes('slide_id,Größe\n'.encode('latin1'))
  with zipfile.ZipFile(tmp_path / 'd.zip', 'w') as archive:
    archive.writestr('a.csv', raw)
    archive.writestr('b.csv', raw)
  with zipfile.ZipFile(tmp_path / 'e.xlsx', 'w') as archive:
    archive.writestr('xl/workbook.xml', '')
  for name, match in [
    ('b.csv.gz', 'unpacked'),
    ('c.csv', 'not UTF-8'),
    ('d.zip', r'^\S*d\.zip: holds 2 tables'),
    ('e.xlsx', 'Excel workbook; save'),
    ('.', 'is a folder'),
  ]:
    with pytest.raises(TableError, match=match):
      read_table(tmp_path / name)
  with pytest.raises(FileNotFoundError, match=r'no table.* has a.csv.gz, b'):
    read_table(tmp_path / 'labels.csv')
  (tmp_path / 'labels_v2.csv').write_text(raw.decode())
  with pytest.raises(FileNotFoundError, match='did you mean .*labels_v2.csv'):
    read_table(tmp_path / 'labels.csv')
  with pytest.raises(FileNotFoundError, match='has no folder'):
    read_table(tmp_path / 'tables' / 'labels.csv')


@pytest.mark.parametrize(
  ('name', 'want'),
  [
    (' a.svs ', 'a'),
    ('TCGA-3M-AB46-01Z-00-DX1.70F6.svs', 'TCGA-3M-AB46-01Z-00-DX1.70F6'),
    ('a.b', 'a.b'),
    ('x.NDPI', 'x'),
  ],
)
def test_ids(name, want):
  assert clean_id(name) == want
