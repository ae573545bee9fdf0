"""Readers, containers and splits; nothing here knows a method."""

from tmlib.data.bag import Bag, batch_bags, bucket_size, pad_bag, subsample_bag
from tmlib.data.folds import (
  fold_statistics,
  instance_statistics,
  standardize,
  stratified_folds,
)
from tmlib.data.graphs import with_knn_graphs
from tmlib.data.mil_csv import MIL_SETS, BagSet, read_mil_csv
from tmlib.data.packing import (
  pack_bags,
  pack_values,
  unpack_instances,
  unpack_values,
)
from tmlib.data.pathways import (
  PathwayCohort,
  pathway_components,
  pathway_graph,
  planted_pathways,
  read_pathway_cohort,
)
from tmlib.data.slides import read_h5, read_pt
from tmlib.data.spots import (
  PATCH_FEATURES,
  SpotSection,
  planted_spots,
  read_spots,
  stain_features,
)
from tmlib.data.validate import make_bag, select_nonempty, validate_bag

__all__ = [
  'MIL_SETS',
  'PATCH_FEATURES',
  'Bag',
  'BagSet',
  'PathwayCohort',
  'SpotSection',
  'batch_bags',
  'bucket_size',
  'fold_statistics',
  'instance_statistics',
  'make_bag',
  'pack_bags',
  'pack_values',
  'pad_bag',
  'pathway_components',
  'pathway_graph',
  'planted_pathways',
  'planted_spots',
  'read_h5',
  'read_mil_csv',
  'read_pathway_cohort',
  'read_pt',
  'read_spots',
  'select_nonempty',
  'stain_features',
  'standardize',
  'stratified_folds',
  'subsample_bag',
  'unpack_instances',
  'unpack_values',
  'validate_bag',
  'with_knn_graphs',
]
