r"""Expression of spots from H&E, and regions beside a pathologist's.

  python experiments/main.py --config=configs/tmevolve_expression.py \
    --config.data.dir=../shared/data/her2st --workdir=runs/expression

The folder holds the public her2st files: counts and positions of each section,
images of C2 to C6, a pathologist's labels of A1, B1, C1 and D1.

Expression: five sections of one patient, each predicted by models that saw the
other four, from 17 features of colour and texture; a within-patient figure. The
250 variable genes are chosen on the training sections. Beside TMEvolve: itself
without a graph (`static`) and with uniform diffusion (`uniform`), and ridge
regressions on the same features, with and without the mean of the neighbours.
Regions: TMEvolve learns each labelled section from its expression alone; its
soft regions are compared with the labels, beside k-means and uniform diffusion.
Contact: windows that hold tumour and immune spots, matched in composition; does
one touch the other? From the image, leaving out a section, and from expression,
leaving out a patient; spots are told by marker genes, which no model sees.
The last step is taken and nothing is chosen on a tested section.

Args after the colon: `:tiny` (simulated sections, seconds).
"""

from ml_collections import ConfigDict

from configs import touching_blobs
from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'config argument {arg!r}: allowed is tiny')
  config = default_config()
  config.experiment = 'tmevolve_expression'
  config.models = ('static', 'uniform', 'tmevolve')
  config.data = ConfigDict(
    dict(
      dir='',
      sections=('C2', 'C3', 'C4', 'C5', 'C6'),
      genes=250,
      # Side of the patch of image around a spot, pixels.
      patch=256,
      # Simulated sections, where no folder is given.
      synthetic=0,
    )
  )
  config.regions = ConfigDict(
    dict(
      sections=('A1', 'B1', 'C1', 'D1'),
      # Clusters of every method; the pathologist knows six kinds of tissue.
      clusters=6,
      # Variable genes of a section, their components, and what is predicted.
      genes=500,
      components=20,
      targets=100,
      # Steps of the uniform diffusion before k-means.
      diffusion=4,
      # Two kinds of tissue whose contact a window would tell, and its side.
      pair=('invasive cancer', 'immune infiltrate'),
      window=6,
      # Concept rows: kinds of tissue by their genes, and controls.
      concepts=('given', 'shuffled', 'random', 'projected'),
    )
  )
  config.contact = _contact()
  # Runs are seeds; a batch holds all training sections.
  config.train.update(
    steps=150, batch_size=4, runs=2, log_every=50, save_every=50, keep=1
  )
  config.optimizer.update(learning_rate=3e-3, weight_decay=1e-2)
  config.tmevolve = ConfigDict(
    dict(
      hidden=64,
      regions=6,
      num_concepts=6,
      steps=4,
      reaction='none',
      dropout=0.25,
      remat=False,
    )
  )
  config.balance = 0.01
  config.report = ConfigDict(dict(top=50, maps=3))
  if arg == 'tiny':
    config.train.quick_compile = True
    config.models = ('static',)
    config.data.update(synthetic=3, genes=12)
    config.regions.update(
      clusters=3, genes=20, components=4, targets=8, diffusion=2,
      pair=('tumour', 'immune'), window=4,
    )  # fmt: skip
    # Simulated genes have no names; the report counts windows all the same.
    config.contact.update(
      inputs=('kinds',),
      models=(),
      concepts=(),
      immune=('gene 0', 'gene 1'),
      tumour=('gene 2', 'gene 3'),
      tumour_share=0.2,
      window=3,
      bootstrap=100,
    )
    config.train.update(steps=4, runs=1, log_every=2, save_every=2)
    config.tmevolve.update(hidden=8, regions=3, num_concepts=2, steps=2)
    config.report.update(top=5, maps=1)
  return config


def _contact() -> ConfigDict:
  """Do tumour and immune tissue touch? Windows, told by markers of both."""
  return ConfigDict(
    dict(
      inputs=('stain', 'expression', 'kinds'),
      models=(
        'mean_pool', 'gated_abmil', 'patch_gcn', 'static', 'uniform',
        'tmevolve',
      ),
      # Rows of the concept matrix, for the input `expression`.
      concepts=('given', 'shuffled', 'random', 'projected'),
      immune=(
        'PTPRC', 'CD2', 'CD3D', 'CD3E', 'CD3G', 'CD8A', 'MS4A1', 'CD19',
        'CD27', 'CD79A', 'IGKC', 'JCHAIN',
      ),
      tumour=('ERBB2', 'EPCAM', 'KRT7', 'KRT8', 'KRT18', 'KRT19'),
      immune_share=0.15,
      tumour_share=0.30,
      window=5,
      # Variable genes without markers, and their components.
      genes=500,
      components=20,
      seeds=5,
      steps=300,
      batch_size=16,
      bootstrap=1000,
      # As in configs/touching_blobs.py: nothing was tuned on this task.
      optimizer=ConfigDict(
        dict(learning_rate=1e-2, warmup=0.1, weight_decay=1e-4)
      ),
      network=touching_blobs.get_config().tmevolve,
    )
  )  # fmt: skip
