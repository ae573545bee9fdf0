"""Readers on small files, and the published figures of popularity."""

import numpy as np
import pytest

from tmlib import recsys

INTER = 'user_id:token\titem_id:token\trating:float\ttimestamp:float\n'


def test_recbole(tmp_path):
  path = tmp_path / 'x.inter'
  path.write_text(INTER + 'u\t3\t5\t100\nu\t20\t1\t90\n')
  for place in (path, tmp_path):
    table = recsys.load_recbole_inter(place)
    assert table.users == ('u',)
    assert table.items == ('3', '20')
    np.testing.assert_array_equal(table.time, [100, 90])


def test_movielens_with_rows_that_were_appended(tmp_path):
  (tmp_path / 'ratings.csv').write_bytes(
    b'userId,movieId,rating,timestamp\r\n1,31,2.5,10\r\n611,31,5,11\r\n'
  )
  table = recsys.load_movielens_csv(tmp_path, max_user=610)
  assert table.users == ('1',)
  assert len(recsys.load_movielens_csv(tmp_path).user) == 2


def test_any_csv_with_missing_modalities(tmp_path):
  path = tmp_path / 'log.csv'
  path.write_text(
    'who,what,when,kind,t0,t1,v\nx,a,1,click,.5,1,\nx,b,2,buy,,,3\n'
  )
  table = recsys.read_events(
    path, user='who', item='what', time='when', action='kind',
    modalities={'text': ('t0', 't1'), 'image': ('v',)},
  )  # fmt: skip
  assert table.actions == ('buy', 'click')
  np.testing.assert_array_equal(table.action, [1, 0])
  np.testing.assert_array_equal(table.features['text'], [[0.5, 1], [0, 0]])
  np.testing.assert_array_equal(table.present['text'], [True, False])
  np.testing.assert_array_equal(table.present['image'], [False, True])


def test_tags(tmp_path):
  path = tmp_path / 'x.item'
  path.write_text('item_id:token\tclass:token_seq\tage:float\n7\tA B\t1\n'
                  '8\tB\t3\n9\tC\t5\n')  # fmt: skip
  values, tags = recsys.read_tags(path, ('8', '7', '1'), numbers=('age',))
  assert tags == ('class=A', 'class=B', 'class=C', 'age')
  sd = np.std([1, 3, 5])
  np.testing.assert_allclose(
    values, [[0, 1, 0, 0], [1, 1, 0, -2 / sd], [0] * 4], rtol=1e-6
  )


def test_a_number_that_is_not_known_is_the_mean(tmp_path):
  path = tmp_path / 'x.user'
  path.write_text('user_id\tjob\tage\nu\tA\t1\nv\tA\t\nw\tB\tnan\n'
                  'x\tB\t3\n')  # fmt: skip
  options = dict(key='user_id', columns=('job',), numbers=('age',))
  values, _ = recsys.read_tags(path, ('u', 'v', 'w', 'x'), **options)
  np.testing.assert_allclose(values[:, 2], [-1, 0, 0, 1])
  path.write_text('user_id\tjob\tage\nu\tA\tinf\n')
  with pytest.raises(ValueError, match='infinite'):
    recsys.read_tags(path, ('u',), **options)


@pytest.mark.parametrize('user', ['1.2', 'nan', '1e30', '-inf'])
def test_movielens_users_are_whole_numbers(tmp_path, user):
  path = tmp_path / 'ratings.csv'
  path.write_text(f'userId,movieId,rating,timestamp\n1,5,3,10\n{user},6,3,11\n')
  with pytest.raises(ValueError, match=f"event 1.*'userId'.*{user}"):
    recsys.load_movielens_csv(path)


@pytest.mark.parametrize(
  ('text', 'match'),
  [
    ('', 'header'),
    (INTER.replace('rating', 'item_id') + 'u\t3\t5\t8\n', "'item_id' 2 times"),
    (INTER, 'at least one event'),
    ('user_id:token\titem_id:token\nu\t1\n', "no column 'timestamp'"),
    (INTER + 'u\t3\t5\n', 'line 2'),
    (INTER + 'u\t3\t5\tnoon\n', 'noon'),
    (INTER + 'u\t3\t5\t881250949000\n', 'milliseconds'),
    (INTER + 'u\t\t5\t8\n', 'item: event 0'),
  ],
)
def test_bad_files(tmp_path, text, match):
  path = tmp_path / 'x.inter'
  path.write_text(text)
  with pytest.raises(ValueError, match=match):
    recsys.load_recbole_inter(path)


def test_files_that_are_not_there_or_not_text(tmp_path):
  with pytest.raises(FileNotFoundError, match='no such file'):
    recsys.load_recbole_inter(tmp_path / 'x.inter')
  with pytest.raises(FileNotFoundError, match='holds 0 files'):
    recsys.load_recbole_inter(tmp_path)
  (tmp_path / 'x.inter').write_bytes(b'PK\x03\x04\xff\xfe')
  with pytest.raises(ValueError, match='UTF-8'):
    recsys.load_recbole_inter(tmp_path)


def test_popularity_on_ml100k_under_three_orders():
  try:
    table = recsys.load_recbole_inter('ml-100k')
  except ModuleNotFoundError:
    pytest.skip('recbole is not installed')
  assert (len(table.user), len(table.users), table.num_items) == (
    100_000, 943, 1682,
  )  # fmt: skip
  for ties, want in (
    ('item', 0.0498), ('file', 0.0859), ('item_descending', 0.1103),
  ):  # fmt: skip
    split = recsys.leave_last_out(recsys.order_events(table, ties))
    scores = np.tile(recsys.popularity_scores(split), (943, 1))
    rank = recsys.target_rank(scores, split.target_items, split.seen())
    assert np.mean(recsys.hit_rate(rank)) == pytest.approx(want, abs=5e-5)
  nothing = np.full(943, -1)
  whole = recsys.history_span(
    recsys.Split(table, recsys.order_events(table).rows, nothing)
  )
  assert (whole < 1).sum() == 638
  assert (whole > 30).sum() == 180


def test_a_missing_package_says_how_to_get_it(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ModuleNotFoundError, match='--no-deps'):
    recsys.load_recbole_inter('ml-100k')
