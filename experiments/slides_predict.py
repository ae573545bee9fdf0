"""Applies the models of a workdir to slides: predictions and heat maps.

Axes: F models (one per fold), B = 1 bag at a time, N patches, C outputs.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from experiments import slides as runner
from experiments import slides_cohort, slides_text
from tmlib import train
from tmlib.config import config_field
from tmlib.data import bucket_size, slides
from tmlib.mil import scale_features
from tmlib.mil.survival import risk_score

__all__ = ['Predictor', 'run', 'write_heatmaps', 'write_study']


def write_study(
  config, study: Any, graph: str, metas: Sequence[dict], workdir: Path,
  text: np.ndarray | None = None,
) -> None:  # fmt: skip
  """Leaves in the workdir what a prediction needs beside the parameters."""
  names = [fold.name for fold in study.folds]
  facts = {
    'config': config.to_dict(),
    'dim': study.dim,
    'graph': graph,
    'coords': study.has_coords,
    'folds': names,
    'metas': list(metas),
  }
  (workdir / 'study.json').write_text(json.dumps(facts, indent=2) + '\n')
  if text is not None:
    np.save(workdir / 'text.npy', text)
  for fold in study.folds:
    found = runner.scaling(config, study, fold)
    if found is not None:
      np.savez(workdir / fold.name / 'scaling.npz', mean=found[0], std=found[1])


class Predictor:
  """Some of the models of a workdir, as one function of a bag.

  Attributes:
    config: that the models were trained with.
    facts: of study.json.
    dim: P.
  """

  def __init__(self, workdir: Path, folds: Sequence[int] | None = None):
    """Loads parameters; raises FileNotFoundError if there are none."""
    path = workdir / 'study.json'
    if not path.is_file():
      raise FileNotFoundError(
        f'no {path}: train there first, to the end, with '
        '--config=configs/slides.py'
      )
    self.facts = json.loads(path.read_text())
    self.config: Any = ConfigDict(self.facts['config'])
    self.config.network.options = tuple(self.config.network.options)
    self.config.data.targets = tuple(self.config.data.targets)
    self.dim = self.facts['dim']
    names = self.facts['folds']
    self._folds = range(len(names)) if folds is None else folds
    folders = [workdir / names[k] for k in self._folds]
    stack = lambda *leaves: np.stack(leaves)
    self._params = jax.tree.map(
      stack, *[train.load_params(folder) for folder in folders]
    )
    self._statistics = None
    if self.config.data.standardize:
      files = [np.load(folder / 'scaling.npz') for folder in folders]
      self._statistics = tuple(
        np.stack([file[k] for file in files]) for k in ('mean', 'std')
      )
    options = runner.network_options(self.config)
    if self.config.data.text:
      text = np.load(workdir / 'text.npy')
      options |= slides_text.options_of(self.config, text, self.dim)
    self._model = runner.make_network(
      self.config, self.dim, self._num_outputs(), options
    )
    # One after the other: a slide is large enough for the device.
    self._apply = jax.jit(
      lambda params, statistics, bag: jax.lax.map(
        lambda one: self._one(one[0], one[1], bag), (params, statistics)
      )
    )

  @property
  def meta(self) -> dict[str, Any]:
    """What the outputs mean."""
    return self.facts['metas'][0]

  def reader(self, files: Any) -> slides.BagReader:
    """Reads bags of any files as those of training were."""
    return runner.make_reader(
      self.config, files, dim=self.dim, graph=self.facts['graph'],
      coords=self.facts['coords'], half=False,
    )  # fmt: skip

  def __call__(self, bag: Any) -> dict[str, np.ndarray]:
    """Outputs [F, C], attention [N] (mean over models), regions [N] or none."""
    n = len(bag.mask)
    batch = slides.stack_bags([bag], bucket_size(n))
    found = jax.device_get(self._apply(self._params, self._statistics, batch))
    outputs = {'outputs': self._read(np.asarray(found['logits'])[:, 0])}
    outputs['attention'] = np.asarray(found['attention'])[:, 0, :n].mean(0)
    if 'regions' in found:
      # Regions of two models are not numbered alike: those of the first.
      outputs['regions'] = np.asarray(found['regions'])[0, 0, :n].argmax(-1)
    return outputs

  def _num_outputs(self) -> int:
    config = self.config
    if config.task == 'survival_cox':
      return 1
    if config.task == 'survival_nll':
      return config.loss.bins
    key = 'classes' if config.task == 'subtype' else 'targets'
    return len(self.meta[key])

  def _one(self, params: Any, statistics: Any, bag: Any) -> dict[str, Any]:
    if statistics is not None:
      bag = scale_features(bag, jnp.zeros(1, jnp.int32), statistics)
    extra: Any = {'trace': True} if self.config.model == 'tmevolve' else {}
    output: Any = self._model.apply({'params': params}, bag, **extra)
    found = {'logits': output.logits, 'attention': output.attention}
    if 'regions' in output.extras:
      found['regions'] = output.extras['regions']
    return found

  def _read(self, logits: np.ndarray) -> np.ndarray:
    """Logits [F, C] as probabilities, survival and risk, or targets."""
    task = self.config.task
    if task == 'subtype':
      return np.asarray(jax.nn.softmax(logits))
    if task == 'survival_cox':
      return logits
    if task == 'survival_nll':
      return np.asarray(risk_score(jnp.asarray(logits)))[:, None]
    metas = [self.facts['metas'][k] for k in self._folds]
    center = np.array([meta['center'] for meta in metas])
    return logits * np.array([meta['scale'] for meta in metas]) + center


def columns(predictor: Predictor) -> list[str]:
  """Names of the outputs."""
  task, meta = predictor.config.task, predictor.meta
  if task == 'subtype':
    return [f'probability_{name}' for name in meta['classes']]
  return list(meta['targets']) if task == 'expression' else ['risk']


def run(config, workdir: Path) -> int:
  """Predicts every slide of `config.predict.features`; the exit code is 0."""
  predictor = Predictor(workdir)
  folder = config.predict.features
  if not folder:
    raise ValueError(
      'predict.features is empty; pass the folder of the new slides, '
      '--config.predict.features=FOLDER'
    )
  with config_field('predict.features'):
    files = _usable(predictor, slides.find_slides(folder), config)
  reader = predictor.reader([(path,) for path in files.values()])
  out = workdir / 'predict'
  out.mkdir(parents=True, exist_ok=True)
  names, rows = columns(predictor), []
  for i, slide in enumerate(files):
    bag = reader.read(i)
    found = predictor(bag)
    rows.append(_row(predictor, slide, len(bag.mask), names, found['outputs']))
    if config.predict.heatmaps:
      write_heatmaps(out / 'heatmaps', slide, reader.slides(i)[0], found)
  with (out / 'predictions.csv').open('w', newline='') as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  logging.info('predictions of %d slides in %s', len(rows), out)
  return 0


def _usable(
  predictor: Predictor, files: dict[str, Path], config
) -> dict[str, Path]:
  """Files that can be predicted; whatever else there is gets a warning."""
  names = list(files)
  blank = np.zeros(len(names))
  cohort = slides.Cohort(
    tuple(names), tuple(names), ('',) * len(names),
    tuple((path,) for path in files.values()), {'none': blank},
  )  # fmt: skip
  scan = slides.scan_slides(list(files.values()), workers=config.train.workers)
  cohort = slides.check_cohort(cohort, scan, incomplete=config.data.incomplete)
  first = cohort.files[0][0]
  dim = scan[first].dim
  if dim != predictor.dim:
    raise ValueError(
      f'features have dim {slides.encoders_of(dim)} but the models were '
      f'trained on {slides.encoders_of(predictor.dim)}; extract them with the '
      f'encoder of training. First file: {first}'
    )
  lack = [g[0] for g in cohort.files if not scan[g[0]].has_coords]
  if lack and predictor.facts['coords']:
    raise ValueError(
      f'{len(lack)} of {len(names)} slides have no positions, but the training '
      f'slides had them. First file: {lack[0]}'
    )
  slides_cohort.warn(cohort.findings)
  return dict(
    zip(cohort.names, (group[0] for group in cohort.files), strict=True)
  )


def _row(
  predictor: Predictor, name: str, patches: int, names: list[str], outputs
) -> dict[str, Any]:
  """One line of predictions.csv: means over models and their spread."""
  mean, spread = outputs.mean(0), outputs.std(0)
  row: dict[str, Any] = {'slide_id': name, 'patches': patches}
  if predictor.config.task == 'subtype':
    row['prediction'] = predictor.meta['classes'][int(mean.argmax())]
  for i, column in enumerate(names):
    row[column] = f'{mean[i]:.6g}'
  if len(outputs) > 1:
    for i, column in enumerate(names):
      row[f'{column}_std'] = f'{spread[i]:.3g}'
  return row


def write_heatmaps(
  folder: Path, name: str, slide: slides.Slide, found: dict[str, np.ndarray]
) -> None:
  """csv, npz, png and GeoJSON of one slide; no picture without positions."""
  from experiments import slides_plots

  folder.mkdir(parents=True, exist_ok=True)
  safe = name.replace('/', '_')
  attention, coords = found['attention'], slide.coords
  more = {k: found[k] for k in ('regions',) if k in found}
  slides.write_heatmap_csv(folder / f'{safe}.csv', coords, attention)
  slides.write_heatmap_npz(folder / f'{safe}.npz', coords, attention, **more)
  if coords is None:
    return
  regions = found.get('regions')
  slides_plots.heatmap(
    folder / f'{safe}.png', name, coords, attention, slide.pitch, regions
  )
  size = slide.patch_size or slide.pitch or 256
  path = folder / f'{safe}.geojson'
  slides.write_patches_geojson(path, coords, attention, size)
  if regions is not None:
    path = folder / f'{safe}_regions.geojson'
    slides.write_regions_geojson(path, coords, regions, slide.pitch or size)
