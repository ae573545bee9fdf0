"""Pictures of tissue: rasters, and files that hold a picture."""

import contextlib

import numpy as np

from experiments import tissue_plots
from experiments.plots import figure


def test_raster_puts_every_patch_in_its_place():
  positions = np.array([[5, 7], [5, 9], [6, 7]])
  image = tissue_plots.to_image(positions, np.array([1.0, 2.0, 3.0]))
  want = [[1, np.nan, 2], [3, np.nan, np.nan]]
  np.testing.assert_array_equal(image, want)


def test_flux_panels_share_their_scale():
  flux = np.arange(12.0).reshape(6, 2)
  panels = tissue_plots.flux_panels(flux, 'bag 1\n')
  assert [p.title.split()[-1] for p in panels] == ['0', '2', '3', '5']
  assert {p.limits for p in panels} == {(0.0, 11.0)}
  assert len(tissue_plots.flux_panels(np.zeros((1, 4)))) == 1


def test_field_panels_leave_out_a_field_of_one_concept():
  seen = {
    'regions': np.eye(3), 'concepts': np.ones((3, 1)), 'attention': np.ones(3)
  }  # fmt: skip
  titles = [
    p.title for p in tissue_plots.field_panels(np.zeros(3, int), ['a'], seen)
  ]
  assert not any('concept' in title for title in titles)
  share = tissue_plots.field_panels(np.zeros(3, int), ['a'], seen)[-1]
  np.testing.assert_array_equal(share.values, [3, 3, 3])


def test_energies_say_which_edges_a_model_without_regions_has(
  tmp_path, monkeypatch
):
  texts = []

  def drawn(path, *args):
    with figure(path, *args) as (fig, axes):
      yield fig, axes
      for ax in axes.flat:
        legend = ax.get_legend()
        texts.append([t.get_text() for t in legend.get_texts()])

  monkeypatch.setattr(tissue_plots, 'figure', contextlib.contextmanager(drawn))
  one, none = np.ones((5, 4)), np.zeros((5, 4))
  tissue_plots.energies(
    tmp_path / 'e.png', {'gated': (one, one), 'plain': (one, none)}, 'title'
  )
  assert texts == [['gated', 'plain (all edges)'], ['gated']]


def test_pictures_are_written(tmp_path):
  rng = np.random.default_rng(0)
  positions = np.stack(np.mgrid[:4, :6], -1).reshape(-1, 2)
  panel = tissue_plots.Panel('x', rng.normal(size=24), None, 'unit')
  kinds = tissue_plots.Panel('y', rng.integers(0, 2, 24), ['a', 'b'])
  maps = tmp_path / 'maps.png'
  tissue_plots.tissue_maps(maps, positions, [[panel, kinds], [panel]], 'maps')
  energy = tmp_path / 'energy.png'
  pair = rng.random((5, 4)), np.zeros((5, 4))
  tissue_plots.energies(energy, {'a': pair}, 'energies')
  curves = tmp_path / 'curves.png'
  line = np.array([0.6, 0.7]), np.array([0.5, 0.6]), np.array([0.8, 0.75])
  tissue_plots.interval_curves(
    curves, [('thin', np.array([1, 2]), {'a': line})], 'curves', 'noise'
  )
  for path in (maps, energy, curves):
    assert path.read_bytes().startswith(b'\x89PNG')
