"""Reaction-diffusion on patch graphs: TMEvolve and its predecessors."""

from kernels_pallas.graph import ell_sddmm, ell_spmm

from tmlib.ops.graph import ell_from_grid
from tmlib.reaction_diffusion.concepts import (
  check_concept_matrix,
  concept_field,
  similarity_logits,
  unit_rows,
)
from tmlib.reaction_diffusion.conductance import (
  Conductance,
  edge_conductance,
  edge_stopping,
  same_region,
  uniform_conductance,
  upwind_velocity,
)
from tmlib.reaction_diffusion.diagnostics import (
  boundary_flux,
  dirichlet_energy,
  identifiable_tables,
  interface_matrix,
  per_bag,
  region_diagnostics,
)
from tmlib.reaction_diffusion.dropout import patch_dropout
from tmlib.reaction_diffusion.dynamics import (
  Coefficients,
  Dynamics,
  Fields,
  make_dynamics,
  right_hand_side,
  sharp_tau,
  stable_tau,
)
from tmlib.reaction_diffusion.evolution import Trace, evolve
from tmlib.reaction_diffusion.integrators import (
  conjugate_gradients,
  euler,
  heun,
  imex_cg,
  imex_residual,
  integrate,
  rk4,
  semi_implicit,
)
from tmlib.reaction_diffusion.model import TMEvolve
from tmlib.reaction_diffusion.options import check_options, check_tau
from tmlib.reaction_diffusion.reactions import (
  REACTIONS,
  Reaction,
  stiffness,
  to_box,
)
from tmlib.reaction_diffusion.readout import (
  RegionSummary,
  aggregate_regions,
  assignment_entropy,
  patch_heatmap,
  patch_softmax,
  prototype_overlap,
  region_balance,
)
from tmlib.reaction_diffusion.regions import (
  RegionParams,
  assign_regions,
  layer_norm,
  membership,
  patch_sum,
  region_usage,
  smooth_regions,
)
from tmlib.reaction_diffusion.right_hand_sides import (
  acmp,
  acmp_bound,
  adr,
  adr_tau,
  attention_weights,
  grand,
  grand_tau,
  gread,
  gread_tau,
)
from tmlib.reaction_diffusion.transport import advection, laplacian, row_sum

__all__ = [
  'REACTIONS',
  'Coefficients',
  'Conductance',
  'Dynamics',
  'Fields',
  'Reaction',
  'RegionParams',
  'RegionSummary',
  'TMEvolve',
  'Trace',
  'acmp',
  'acmp_bound',
  'adr',
  'adr_tau',
  'advection',
  'aggregate_regions',
  'assign_regions',
  'assignment_entropy',
  'attention_weights',
  'boundary_flux',
  'check_concept_matrix',
  'check_options',
  'check_tau',
  'concept_field',
  'conjugate_gradients',
  'dirichlet_energy',
  'edge_conductance',
  'edge_stopping',
  'ell_from_grid',
  'ell_sddmm',
  'ell_spmm',
  'euler',
  'evolve',
  'grand',
  'grand_tau',
  'gread',
  'gread_tau',
  'heun',
  'identifiable_tables',
  'imex_cg',
  'imex_residual',
  'integrate',
  'interface_matrix',
  'laplacian',
  'layer_norm',
  'make_dynamics',
  'membership',
  'patch_dropout',
  'patch_heatmap',
  'patch_softmax',
  'patch_sum',
  'per_bag',
  'prototype_overlap',
  'region_balance',
  'region_diagnostics',
  'region_usage',
  'right_hand_side',
  'rk4',
  'row_sum',
  'same_region',
  'semi_implicit',
  'sharp_tau',
  'similarity_logits',
  'smooth_regions',
  'stable_tau',
  'stiffness',
  'to_box',
  'uniform_conductance',
  'unit_rows',
  'upwind_velocity',
]
