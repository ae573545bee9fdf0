"""Slides as users have them: features, tables, splits, cohorts, heat maps."""

from tmlib.data.slides.arrays import SUFFIXES, read_header, read_slide
from tmlib.data.slides.bags import GRAPHS, BagReader, sample_patches, stack_bags
from tmlib.data.slides.cohort import (
  Cohort,
  CohortError,
  apply_split,
  check_cohort,
  join_slides,
)
from tmlib.data.slides.files import find_slides
from tmlib.data.slides.h5 import read_h5, read_h5_header
from tmlib.data.slides.heatmaps import (
  heatmap_raster,
  percentile_ranks,
  region_polygons,
  write_heatmap_csv,
  write_heatmap_npz,
  write_patches_geojson,
  write_regions_geojson,
)
from tmlib.data.slides.pt import read_pt
from tmlib.data.slides.samplers import (
  balanced_order,
  epoch_order,
  event_balanced_order,
)
from tmlib.data.slides.scan import (
  Scan,
  ScanRow,
  merge_moments,
  scan_slides,
)
from tmlib.data.slides.slide import (
  ENCODERS,
  Header,
  Slide,
  SlideFileError,
  UnsafeFileError,
  encoders_of,
)
from tmlib.data.slides.splits import (
  Split,
  patient_folds,
  read_splits,
  site_folds,
)
from tmlib.data.slides.table import Table, TableError, clean_id, read_table
from tmlib.data.slides.tables import (
  SlideTable,
  read_labels,
  read_survival,
  read_targets,
)

__all__ = [
  'ENCODERS',
  'GRAPHS',
  'SUFFIXES',
  'BagReader',
  'Cohort',
  'CohortError',
  'Header',
  'Scan',
  'ScanRow',
  'Slide',
  'SlideFileError',
  'SlideTable',
  'Split',
  'Table',
  'TableError',
  'UnsafeFileError',
  'apply_split',
  'balanced_order',
  'check_cohort',
  'clean_id',
  'encoders_of',
  'epoch_order',
  'event_balanced_order',
  'find_slides',
  'heatmap_raster',
  'join_slides',
  'merge_moments',
  'patient_folds',
  'percentile_ranks',
  'read_h5',
  'read_h5_header',
  'read_header',
  'read_labels',
  'read_pt',
  'read_slide',
  'read_splits',
  'read_survival',
  'read_table',
  'read_targets',
  'region_polygons',
  'sample_patches',
  'scan_slides',
  'site_folds',
  'stack_bags',
  'write_heatmap_csv',
  'write_heatmap_npz',
  'write_patches_geojson',
  'write_regions_geojson',
]
