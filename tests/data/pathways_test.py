"""Pathway cohorts: tables by hand, components by eigenvectors, graphs."""

import numpy as np
import pytest

from tmlib.data import (
  pathway_components,
  pathway_graph,
  planted_pathways,
  read_pathway_cohort,
)
from tmlib.data.slides import TableError


def write(folder, **changes):
  """A study of three patients; a value None leaves the file out."""
  files = {
    'tcga_x.csv': (
      ',case_id,slide_id,survival_months,survival_months_dss,censorship,'
      'censorship_dss\n0,P1,P1-a.svs,5,6,0,1\n1,P1,P1-b.svs,5,6,0,1\n'
      '2,P2,P2.svs,7,7,1,1\n3,P3,P3.svs,2,2,0,0\n'
    ),
    'x_rna_clean.csv': ',A,B,C\nP3,1,2,3\nP1,4,5,6\nP2,7,8,9\n',
    'hallmarks_signatures.csv': 'one,two,small\nA,C,A\nB,B,Z\nZ,,\n',
    'splits_x/splits_0.csv': ',train,val\n0,P1,P3\n1,P2,\n',
    'splits_x/splits_1.csv': ',train,val\n0,P3,P1\n1,,P9\n',
  } | changes
  for name, text in files.items():
    if text is not None:
      path = folder / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
  return folder


def test_reads_tables_as_they_are_written(tmp_path):
  found = read_pathway_cohort(write(tmp_path), 'x')
  assert found.cases == ('P1', 'P2', 'P3')
  assert found.genes == ('A', 'B', 'C')
  np.testing.assert_array_equal(
    found.expression, [[4, 5, 6], [7, 8, 9], [1, 2, 3]]
  )
  np.testing.assert_array_equal(found.time, [5, 7, 2])
  # censorship = 1 means censored.
  np.testing.assert_array_equal(found.event, [True, False, True])
  assert found.pathways == ('one', 'two')
  np.testing.assert_array_equal(found.membership, [[1, 1, 0], [0, 1, 1]])
  np.testing.assert_array_equal(found.test, [[0, 0, 1], [1, 0, 0]])
  np.testing.assert_array_equal(found.train, [[1, 1, 0], [0, 0, 1]])
  assert found.missing == ('P9',)


def test_another_endpoint_has_its_own_censoring(tmp_path):
  found = read_pathway_cohort(write(tmp_path), 'x', endpoint='dss')
  np.testing.assert_array_equal(found.time, [6, 7, 2])
  np.testing.assert_array_equal(found.event, [False, False, True])


@pytest.mark.parametrize(
  ('changes', 'error', 'match'),
  [
    ({'x_rna_clean.csv': None}, FileNotFoundError, 'x_rna_clean.*SurvPath'),
    ({'x_rna_clean.csv': ',A\nP1,oops\n'}, TableError, "line 2.*A = 'oops'"),
    ({'x_rna_clean.csv': ',A\nP1,\n'}, TableError, 'A.*no finite'),
    ({'x_rna_clean.csv': ',A,B,C\nQ,1,2,3\n'}, TableError, 'one study'),
    ({'hallmarks_signatures.csv': 'one\nZ\n'}, TableError, 'gene symbols'),
    (
      {'splits_x/splits_0.csv': ',train,val\n0,P1,P8\n'},
      TableError,
      'splits_0 tests no patient',
    ),
  ],
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path, changes, error, match):
  with pytest.raises(error, match=match):
    read_pathway_cohort(write(tmp_path, **changes), 'x')


def test_a_missing_folder_and_an_unknown_endpoint(tmp_path):
  with pytest.raises(FileNotFoundError, match='no folder .*rna_clean'):
    read_pathway_cohort(tmp_path / 'none')
  with pytest.raises(ValueError, match='endpoint.*os, dss, pfi'):
    read_pathway_cohort(tmp_path, endpoint='death')


def test_pathways_join_by_shared_genes():
  member = np.array(
    [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]], bool
  )
  graph = pathway_graph(member, 2)
  edges = {
    (i, int(j))
    for i in range(4)
    for j, real in zip(graph.nbr[i], graph.emask[i], strict=True)
    if real
  }
  assert edges == {(0, 1), (1, 0), (0, 2), (2, 0)}
  # With one slot the strongest: 2 of 3 genes against 1 of 4.
  one = pathway_graph(member, 1)
  assert np.asarray(one.emask).sum() == 2
  assert one.nbr[0, 0] == 1
  with pytest.raises(ValueError, match='k must be'):
    pathway_graph(member, 0)


def test_components_are_those_of_the_training_covariance():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(30, 5)) @ rng.normal(size=(5, 5))
  member = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 1]], bool)
  train = np.arange(30) < 20
  found = pathway_components(x, member, train, 2)
  z = (x - x[train].mean(0)) / x[train].std(0)
  vectors = np.linalg.eigh(np.cov(z[train][:, :3].T))[1][:, [2, 1]]
  vectors *= np.sign(vectors.sum(0))
  score = z[:, :3] @ vectors
  want = score / score[train].std(0)
  np.testing.assert_allclose(found[:, 0], want, rtol=1e-4, atol=1e-5)
  # One gene: itself, and nothing beyond.
  np.testing.assert_allclose(found[:, 1, 0], z[:, 4], rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(found[:, 1, 1], 0)
  # A tested patient has no part in it.
  other = x.copy()
  other[25] += 100
  again = pathway_components(other, member, train, 2)
  np.testing.assert_array_equal(
    np.delete(again, 25, 0), np.delete(found, 25, 0)
  )


def test_planted_risk_comes_from_the_pathways_that_carry_it():
  found = planted_pathways(2000, seed=1)
  scores = pathway_components(
    found.expression, found.membership, np.ones(2000, bool), 1
  )[..., 0]
  died = found.event
  link = [
    np.corrcoef(s[died], np.log(found.time[died]))[0, 1] for s in scores.T
  ]
  assert link[0] < -0.2
  assert link[1] > 0.2
  assert np.abs(link[3:]).max() < 0.12
  np.testing.assert_array_equal(found.test.sum(0), 1)
  with pytest.raises(ValueError, match='patients for'):
    planted_pathways(6)
