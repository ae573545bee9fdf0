"""Recommendation from logs of interactions, and users whose interests drift."""

from tmlib.recsys.baselines import (
  markov_scores,
  markov_table,
  popularity_scores,
)
from tmlib.recsys.events import (
  TIES,
  EventTable,
  Sequences,
  make_events,
  order_events,
)
from tmlib.recsys.method import dumoe_stages, sasrec_method
from tmlib.recsys.metrics import hit_rate, mrr, ndcg, recall, target_rank
from tmlib.recsys.options import DUMoEConfig
from tmlib.recsys.readers import (
  find_ml100k,
  load_movielens_csv,
  load_recbole_inter,
  read_events,
  read_tags,
)
from tmlib.recsys.recommend import Recommender
from tmlib.recsys.splits import Split, history_span, leave_last_out, time_split
from tmlib.recsys.windows import query_windows, training_windows

__all__ = [
  'TIES',
  'DUMoEConfig',
  'EventTable',
  'Recommender',
  'Sequences',
  'Split',
  'dumoe_stages',
  'find_ml100k',
  'history_span',
  'hit_rate',
  'leave_last_out',
  'load_movielens_csv',
  'load_recbole_inter',
  'make_events',
  'markov_scores',
  'markov_table',
  'mrr',
  'ndcg',
  'order_events',
  'popularity_scores',
  'query_windows',
  'read_events',
  'read_tags',
  'recall',
  'sasrec_method',
  'target_rank',
  'time_split',
  'training_windows',
]
