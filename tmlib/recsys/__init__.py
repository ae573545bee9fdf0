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
from tmlib.recsys.metrics import hit_rate, mrr, ndcg, recall, target_rank
from tmlib.recsys.readers import (
  find_ml100k,
  load_movielens_csv,
  load_recbole_inter,
  read_events,
  read_tags,
)
from tmlib.recsys.splits import Split, history_span, leave_last_out, time_split

__all__ = [
  'TIES',
  'EventTable',
  'Sequences',
  'Split',
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
  'read_events',
  'read_tags',
  'recall',
  'target_rank',
  'time_split',
]
