r"""TMEvolve: regions and concepts that evolve on the patch graph of a slide.

  X -> H0 (embedding), Z0 (concepts) -> S (soft regions) -> a, b (conductances)
    -> T steps of reaction-diffusion -> means of regions -> attention -> head

This file is wiring: every arrow is a pure function of its own module, and the
parameters are declared here.

Axes: B bags (any leading axes), N patches (padded), P features, Q dimensions of
a text space, K slots, S bags packed in a row, D hidden, M concepts, R regions,
C outputs, T steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

# The family is built on bags.
from tmlib.data.bag import check_bag
from tmlib.mil import Bag, MILOutput
from tmlib.reaction_diffusion import conductance as edges
from tmlib.reaction_diffusion import diagnostics, readout
from tmlib.reaction_diffusion.concepts import check_concept_matrix
from tmlib.reaction_diffusion.dropout import patch_dropout
from tmlib.reaction_diffusion.dynamics import (
  Coefficients,
  Fields,
  stable_tau,
)
from tmlib.reaction_diffusion.evolution import evolve
from tmlib.reaction_diffusion.layers import (
  ConceptLayer,
  Readout,
  wide_dtype,
)
from tmlib.reaction_diffusion.options import check_options, largest_lam
from tmlib.reaction_diffusion.reactions import to_box
from tmlib.reaction_diffusion.regions import (
  RegionParams,
  assign_regions,
  membership,
)
from tmlib.reaction_diffusion.transport import align

__all__ = ['TMEvolve']

_NORMAL = nn.initializers.normal
_FAN_IN = nn.initializers.lecun_normal()


def _logit(p: float):
  """Starts a parameter where its sigmoid is p, in (0, 1)."""
  return nn.initializers.constant(float(np.log(p / (1 - p))))


class TMEvolve(nn.Module):
  r"""Slide-level prediction from an evolved tissue field.

  Attributes:
    num_outputs: C, classes, survival bins, or genes.
    task: 'classify', 'survival' (both: logits only) or 'expression', which adds
      a prediction for every patch in `extras['node_outputs']`, from [H0 | H^T]:
      the skip keeps what diffusion takes away.
    hidden: D.
    regions: R.
    num_concepts: M of concept_mode 'learned'; a given matrix decides otherwise.
    concept_mode: 'similarity' (cosine of `bag.concepts`, or of the features if
      they live in the text space, with `concept_matrix`), 'projected' (a
      learned linear map of the features first), 'learned' (M free concepts) or
      'none'.
    concept_matrix: [M, Q], text embeddings, checked and normalised.
    activation: 'softmax' for exclusive concepts, 'sigmoid' otherwise.
    steps: T; 0 is the static model, which reads no graph at all: smoothing is
      skipped too, since it would let neighbours speak.
    integrator: 'euler', 'heun', 'rk4', 'semi_implicit' or 'imex_cg'.
    tau: 'learned' (a learned share of the stability bound, from `cfl` on),
      'cfl' (that share, fixed), or a number. A number within the bound stays
      within it: then the reaction rate is learned below 1 / tau - 1 only.
    cfl: share of the bound, in (0, 1]; below 1 where it is learned.
    reaction: 'none', 'relax', 'fisher', 'allen_cahn' or 'zeldovich'.
    lam: reaction rate in [0, 1) to start from; it is learned. 0 switches the
      reaction off.
    flux: 'symmetric', or 'upwind' for an additional directed flux of H.
    same_region: 'inner' or 'bhattacharyya', see `conductance.same_region`.
    edge_stopping: Perona-Malik factor inside regions.
    degree: K of the normaliser 1 / K; None takes the width of the table. Set it
      where tables of several widths are mixed: padding a table with slots would
      change K.
    reassign: regions 'once', or anew for 'every_step' (explicit integrators: at
      every stage of it).
    refine_iters: shifts of the prototypes towards the slide.
    smooth_iters: passes of spatial smoothing of the regions.
    omega: weight of the smoothing, in (0, 1].
    temperature: of the assignment.
    pooling: 'region' (means of regions, attention over them) or 'patch'
      (attention over patches).
    diffusion: False removes diffusion inside regions.
    boundary_flux: False removes all flux across boundaries.
    concept_flux: False removes what a flux of concepts adds to H.
    uniform: True is the control: one conductance 1 / K for all edges, no
      regions and no concepts in the dynamics, same width, steps and readout.
    dropout: rate on the embedding.
    remat: recompute steps in the backward pass.
    cg_iterations: of 'imex_cg', at most; it stops when it has converged.
    axis_name: mesh axis that splits the patches, for bags without a graph; a
      split graph knows its own.
    dtype: of the large matrix products (embedding, projection, readout), for
      example bfloat16. The fields, the evolution and every sum stay in float32
      or wider, so that facts S1-S4 hold.
    param_dtype: of the parameters.

  References:
    TMEvolve's abstract states regions, two local dynamics and aggregation, but
    no formula: the definition is our choice, see the modules of this package.
  """

  num_outputs: int = 2
  task: str = 'classify'
  hidden: int = 128
  regions: int = 8
  num_concepts: int = 8
  concept_mode: str = 'learned'
  concept_matrix: Any = None
  activation: str = 'softmax'
  steps: int = 6
  integrator: str = 'euler'
  tau: float | str = 'learned'
  cfl: float = 0.9
  reaction: str = 'none'
  lam: float = 0.5
  flux: str = 'symmetric'
  same_region: str = 'inner'
  edge_stopping: bool = False
  degree: int | None = None
  reassign: str = 'once'
  refine_iters: int = 1
  smooth_iters: int = 2
  omega: float = 0.5
  temperature: float = 0.5
  pooling: str = 'region'
  diffusion: bool = True
  boundary_flux: bool = True
  concept_flux: bool = True
  uniform: bool = False
  dropout: float = 0.0
  remat: bool = True
  cg_iterations: int = 1000
  axis_name: str | None = None
  dtype: Any = None
  param_dtype: Any = jnp.float32

  def __post_init__(self):
    check_options(self)
    if self.concept_matrix is not None:
      matrix = check_concept_matrix(self.concept_matrix)
      # Tuples, so that the module stays hashable.
      self.concept_matrix = tuple(map(tuple, matrix.tolist()))
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    bag: Bag,
    *,
    train: bool = False,
    trace: bool = False,
    dropout_keys: jax.Array | None = None,
  ) -> MILOutput:
    """Predicts each bag from its own patches only.

    Args:
      bag: leaves [B, N, ...] (or [N, ...] for one bag). Padded rows may hold
        anything.
      train: whether to drop units.
      trace: whether to fill `extras` with fields, regions, fluxes, energies.
      dropout_keys: [B], one key per row. The mask of a patch then depends on
        its row's key and its position only: not on padding, batch size, device
        layout or micro-batches. Without them the 'dropout' rng is used, folded
        with the position in the batch.

    Returns:
      MILOutput, with one bag per row, or S bags where rows are packed.

    Raises:
      TypeError: no Bag, or a graph that is no neighbour table.
      ValueError: a bag without graph for steps > 0, concepts that do not fit.
    """
    self._check_bag(bag)
    graph = bag.graph if self.steps > 0 else None
    axis_name = self.axis_name
    if bag.graph is not None:
      axis_name = bag.graph.axis_name
    mask = jnp.asarray(bag.mask)
    member = membership(mask, bag.segment_ids, bag.num_segments)
    # where, not multiply, and before any product: 0 * NaN is NaN, and a
    # gradient of the weights sums over padded rows as well.
    features = jnp.where(mask[..., None], jnp.asarray(bag.features), 0)
    keys = self._dropout_keys(mask, train, dropout_keys)
    options = {'dtype': self.dtype, 'param_dtype': self.param_dtype}
    read_concepts = ConceptLayer(
      self.concept_mode,
      self.concept_matrix,
      self.activation,
      param_dtype=self.param_dtype,
      name='concepts',
    )
    # One product for both: the features are the largest array by far.
    mapped = self._dense(self.hidden + self._mapped, 'embed', use_bias=False)
    hidden, scores = jnp.split(mapped(features), [self.hidden], -1)
    start = Fields(
      self._embed(hidden, mask, keys, axis_name),
      read_concepts(bag, scores, mask),
    )

    params = self._region_params(start.concepts.shape[-1])
    assign = lambda fields: assign_regions(
      fields.hidden,
      fields.concepts,
      member,
      params,
      graph,
      temperature=self.temperature,
      refine_iters=self.refine_iters,
      smooth_iters=self.smooth_iters,
      omega=self.omega,
      degree=self.degree,
      axis_name=axis_name,
    )
    regions = assign(start)
    fields, seen = start, {}
    if graph is not None:
      fields, regions, seen = self._evolve(start, regions, assign, graph, trace)
    read = Readout(
      self.hidden, self.num_outputs, self.pooling, name='readout', **options
    )
    output = read(fields, regions, member, axis_name)
    overlap = readout.prototype_overlap(params.prototypes)
    output.aux['prototype_overlap'] = jnp.broadcast_to(
      overlap, output.logits.shape[:-1]
    )
    if self.task == 'expression':
      both = jnp.concatenate([start.hidden, fields.hidden], -1)
      node = self._dense(self.num_outputs, 'node_head')(both)
      node = jnp.where(mask[..., None], node.astype(both.dtype), 0)
      output.extras['node_outputs'] = node
    if trace:
      output.extras.update(seen)
      output.extras.update(
        regions=regions,
        concepts=fields.concepts,
        hidden=fields.hidden,
      )
    return _drop_axis(output) if bag.segment_ids is None else output

  def _check_bag(self, bag: Bag) -> None:
    check_bag(bag)
    if self.steps > 0 and bag.graph is None:
      raise ValueError(
        f'steps={self.steps} needs a patch graph but bag.graph is None; build '
        'one with tmlib.ops.graph (ell_from_grid, knn_graph), or set steps=0'
      )
    if self.steps > 0 and bag.graph is not None and self.degree is not None:
      slots = bag.graph.nbr.shape[-1]
      if slots > self.degree:
        raise ValueError(
          f'the patch graph has K={slots} slots but degree={self.degree}; '
          f'stability needs degree >= K: set degree={slots}'
        )
    if not self.is_initializing() and 'embed' in self.variables['params']:
      want = self.variables['params']['embed']['kernel'].shape[0]
      if bag.features.shape[-1] != want:
        raise ValueError(
          f'features have dim {bag.features.shape[-1]} but the model was built '
          f'for {want}; use the encoder that it was trained with'
        )

  def _dense(self, features: int, name: str, **kwargs) -> nn.Dense:
    return nn.Dense(
      features,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      name=name,
      **kwargs,
    )

  def _table(self, name: str, init, *shape: int) -> jax.Array:
    return self.param(name, init, shape, self.param_dtype)

  def _dropout_keys(self, mask, train, keys):
    """One key per row, or None."""
    if not train or self.dropout == 0:
      return None
    if keys is not None:
      return keys
    key = self.make_rng('dropout')
    count = int(np.prod(mask.shape[:-1], dtype=int))
    fold = jax.vmap(lambda i: jax.random.fold_in(key, i))
    return fold(jnp.arange(count)).reshape(mask.shape[:-1])

  @property
  def _mapped(self) -> int:
    """Width of the linear map of the features that concepts read."""
    if self.concept_mode == 'projected':
      return len(self.concept_matrix[0])
    return self.num_concepts if self.concept_mode == 'learned' else 0

  def _embed(self, hidden, mask, keys, axis_name):
    """H0 = dropout(GELU(LN(X W + b))) [..., N, D], zeros in padding."""
    wide = wide_dtype(self.param_dtype)
    norm = nn.LayerNorm(dtype=wide, param_dtype=self.param_dtype, name='norm')
    bias = self._table('embed_bias', nn.initializers.zeros, self.hidden)
    h = norm(hidden.astype(wide) + align(bias.astype(wide), hidden.ndim))
    h = to_box(nn.gelu(h), self._active_reaction)
    if keys is not None:
      h = patch_dropout(h, self.dropout, keys, axis_name)
    return jnp.where(mask[..., None], h, 0)

  @property
  def _active_reaction(self) -> str:
    return self.reaction if self.lam > 0 else 'none'

  def _region_params(self, concepts: int) -> RegionParams:
    d, r = self.hidden, self.regions
    by_concept, update = None, None
    if self.concept_mode != 'none':
      shape = (r, concepts)
      by_concept = self._table('concept_prototypes', _NORMAL(1.0), *shape)
    if self.refine_iters > 0:
      update = self._table('region_update', _FAN_IN, d, d)
    return RegionParams(
      query=self._table('region_query', _FAN_IN, d, d),
      prototypes=self._table('prototypes', _NORMAL(1.0), r, d),
      concept_prototypes=by_concept,
      update=update,
    )

  def _evolve(self, start, regions, assign, graph, trace):
    """T steps; returns the fields, the last regions and what was seen."""
    tau, lam = self._step_size()
    base = self._base_coefficients(start.hidden.shape[-1], lam)
    tables = self._tables(start.concepts.shape[-1])

    def conduct(fields, regions):
      if self.uniform:
        weights = edges.uniform_conductance(
          graph, fields.hidden.dtype, self.degree
        )
        return base.replace(intra=weights), None
      stopping = None
      if 'stopping' in tables:
        stopping = edges.edge_stopping(
          fields.hidden @ tables['stopping'], graph
        )
      c = edges.edge_conductance(
        regions,
        fields.concepts,
        graph,
        theta=tables.get('theta'),
        bias=tables.get('gate_bias', 0.0),
        kind=self.same_region,
        stopping=stopping,
        degree=self.degree,
      )
      velocity = None
      if 'phi' in tables:
        velocity = edges.upwind_velocity(
          c.boundary, fields.concepts, tables['phi'], graph
        )
      full = base.replace(
        intra=c.intra if self.diffusion else None,
        boundary=c.boundary if self.boundary_flux else None,
        exchange=tables.get('exchange'),
        velocity=velocity,
      )
      return full, c

    coefficients, seen = conduct(start, regions)
    if self.reassign == 'every_step' and not self.uniform:
      coefficients = lambda fields: conduct(fields, assign(fields))[0]
    fields, path = evolve(
      start,
      coefficients,
      graph,
      tau,
      self.steps,
      integrator=self.integrator,
      remat=self.remat,
      trace=trace,
      iterations=self.cg_iterations,
    )
    if self.reassign == 'every_step':
      regions = assign(fields)
      seen = conduct(fields, regions)[1]
    if path is None:
      return fields, regions, {}
    lead = start.hidden.ndim - 2
    extras: dict[str, Any] = {
      name: jnp.moveaxis(value, 0, lead)
      for name, value in path._asdict().items()
    }
    extras.update(tau=tau, lam=lam, **tables)
    if seen is not None:
      extras.update(
        same_region=seen.same,
        boundary=seen.boundary,
        interface=diagnostics.interface_matrix(
          regions, seen.boundary, graph, graph.axis_name
        ),
      )
    return fields, regions, extras

  def _step_size(self):
    """The step and the reaction rate, legal for all of their parameters."""
    wide = wide_dtype(self.param_dtype)
    options = {'reaction': self._active_reaction, 'flux': self.flux}
    lam = jnp.zeros((), wide)
    if self._active_reaction != 'none':
      top = largest_lam(self.tau, integrator=self.integrator, **options)
      lam = top * nn.sigmoid(self._table('lam', _logit(self.lam / top)))
    if not isinstance(self.tau, str):
      return jnp.asarray(self.tau, wide), lam
    share = self.cfl
    if self.tau == 'learned':
      share = nn.sigmoid(self._table('tau', _logit(self.cfl)))
    return share * stable_tau(lam, **options), lam

  def _base_coefficients(self, dim: int, lam: jax.Array) -> Coefficients:
    """Gains and reaction; the conductances come later."""
    start = nn.initializers.zeros

    def gain(name, used, *shape):
      # What is not used has no parameter, which would only drift.
      if not used:
        return jnp.zeros(shape, wide_dtype(self.param_dtype))
      return nn.sigmoid(self._table(name, start, *shape))

    inside = self.diffusion or self.uniform
    across = self.boundary_flux and not self.uniform
    moving = self.concept_mode != 'none'
    relax = self._active_reaction == 'relax'
    kernel, bias = None, None
    if relax:
      kernel = self._table('reaction_kernel', _FAN_IN, dim, dim)
      bias = self._table('reaction_bias', start, dim)
    return Coefficients(
      intra=None,
      boundary=None,
      alpha=gain('alpha', inside, dim),
      eta=gain('eta', across, dim),
      alpha_z=gain('alpha_z', inside and moving),
      eta_z=gain('eta_z', across and moving),
      lam=lam,
      kernel=kernel,
      bias=bias,
      reaction=self._active_reaction,
    )

  def _tables(self, concepts: int) -> dict[str, jax.Array]:
    """What depends on concepts: only tables that the dynamics read."""
    if self.uniform:
      return {}
    tables = {}
    if self.edge_stopping:
      size = min(16, self.hidden)
      tables['stopping'] = self._table('stopping', _FAN_IN, self.hidden, size)
    if not self.boundary_flux:
      return tables
    tables['gate_bias'] = self._table('gate_bias', nn.initializers.zeros)
    if self.concept_mode == 'none':
      return tables
    square = (concepts, concepts)
    tables['theta'] = self._table('theta', _NORMAL(0.5), *square)
    if self.concept_flux:
      tables['exchange'] = self._table(
        'exchange', _NORMAL(concepts**-0.5), concepts, self.hidden
      )
    if self.flux == 'upwind':
      tables['phi'] = self._table('phi', _NORMAL(0.5), *square)
    return tables


def _drop_axis(output: MILOutput) -> MILOutput:
  """Removes the axis S of rows that are one bag."""
  s_axis = {'region_usage': -2, 'region_attention': -2}
  extras = {
    name: jnp.squeeze(x, s_axis[name]) if name in s_axis else x
    for name, x in output.extras.items()
  }
  return output.replace(
    logits=jnp.squeeze(output.logits, -2),
    slide_features=jnp.squeeze(output.slide_features, -2),
    aux={name: jnp.squeeze(x, -1) for name, x in output.aux.items()},
    extras=extras,
  )
