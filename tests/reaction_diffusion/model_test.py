"""TMEvolve as a whole: against NumPy, invariances, bad bags, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

from kernels_pallas.graph import PatchGraph, shard_graph
from tests.reaction_diffusion import support
from tmlib.data.packing import pack_bags
from tmlib.mil import Bag, MILOutput, batch_bags, pad_bag
from tmlib.ops.packing import plan_packing
from tmlib.reaction_diffusion import TMEvolve

P, D, R, M, T = 6, 8, 3, 3, 3
MODEL = TMEvolve(
  3, hidden=D, regions=R, num_concepts=M, steps=T, reaction='relax'
)


def slide(seed, patches, rows=5, columns=5):
  rng = np.random.default_rng(seed)
  _, graph = support.grid_graph(rng, rows, columns, patches)
  features = rng.normal(size=(patches, P)).astype(np.float32)
  return Bag(features, np.ones(patches, bool), graph)


def isolated(seed, patches):
  """Patches that touch no other."""
  own = np.repeat(np.arange(patches, dtype=np.int32)[:, None], 4, 1)
  graph = PatchGraph(own, np.zeros((patches, 4), bool), np.zeros_like(own))
  features = np.random.default_rng(seed).normal(size=(patches, P))
  return Bag(features.astype(np.float32), np.ones(patches, bool), graph)


def poison(batch):
  """NaN and infinity in all padding."""
  bad = np.where(np.arange(P) % 2, np.nan, np.inf).astype(np.float32)
  return batch.replace(
    features=np.where(batch.mask[..., None], batch.features, bad)
  )


A, B = slide(0, 13), slide(1, 20)
PAIR = poison(batch_bags([A, B], 24))


@functools.cache
def compiled(model, **options):
  return jax.jit(lambda variables, bag: model.apply(variables, bag, **options))


@functools.cache
def variables(model=MODEL):
  return jax.jit(model.init)(jax.random.key(0), PAIR)


def run(bag, model=MODEL, **options):
  return jax.tree.map(
    np.asarray, compiled(model, **options)(variables(model), bag)
  )


def layer_norm(x):
  x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def gelu(x):
  return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def model_by_matrices(p, bag):
  """The definition, for one bag, with dense matrices in float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), p['params'])
  linear = lambda x, w: x @ w['kernel'] + w.get('bias', 0)
  x, e, k = bag.features.astype(np.float64), support.dense(bag.graph), 4
  mapped = x @ p['embed']['kernel']
  norm = layer_norm(mapped[:, :D] + p['embed_bias'])
  h0 = h = gelu(norm * p['norm']['scale'] + p['norm']['bias'])
  z = softmax(mapped[:, D:])
  # Regions: assignment, one refinement, two smoothings with omega = 1/2.
  query = layer_norm(h) @ p['region_query'] / np.sqrt(D)
  offset = z @ p['concept_prototypes'].T
  q = p['prototypes']
  s = softmax((query @ q.T + offset) / 0.5)
  q = q + (s.T @ h / s.sum(0)[:, None] - q) @ p['region_update']
  s = softmax((query @ q.T + offset) / 0.5)
  for _ in range(2):
    s = (1 - e.sum(1, keepdims=True) / (2 * k)) * s + e @ s / (2 * k)
  # Conductances.
  rho = s @ s.T
  theta = (p['theta'] + p['theta'].T) / 2
  gate = sigmoid(z @ theta @ z.T + p['gate_bias'])
  a, b = e * rho / k, e * (1 - rho) * gate / k
  laplace = lambda w, u: w @ u - w.sum(1, keepdims=True) * u
  lam = sigmoid(p['lam'])
  tau = sigmoid(p['tau']) / (1 + lam)
  alpha, eta = sigmoid(p['alpha']), sigmoid(p['eta'])
  for _ in range(T):
    target = np.tanh(h @ p['reaction_kernel'] + p['reaction_bias'])
    dh = alpha * laplace(a, h) + eta * laplace(b, h)
    dh += laplace(b, z) @ p['exchange'] + lam * (target - h)
    dz = sigmoid(p['alpha_z']) * laplace(a, z)
    dz += sigmoid(p['eta_z']) * laplace(b, z)
    h, z = h + tau * dh, z + tau * dz
  # Readout.
  r = p['readout']
  mass = s.sum(0)
  mean = s.T @ np.concatenate([h, z], 1) / mass[:, None]
  g = gelu(linear(mean, r['unit']))
  att = r['attention']
  score = linear(
    np.tanh(linear(g, att['v'])) * sigmoid(linear(g, att['u'])), att['w']
  )
  w = softmax(score[:, 0])
  assert np.abs(h - h0).max() > 0.1
  return linear(w @ g, r['head']), s @ (w / mass)


def test_equals_the_definition():
  found = run(PAIR)
  p = variables()
  # Off the symmetric start, so that every parameter matters.
  p = jax.tree.map(
    lambda x: x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape), p
  )
  found = compiled(MODEL)(p, PAIR)
  for i, bag in enumerate((A, B)):
    logits, heat = model_by_matrices(p, bag)
    np.testing.assert_allclose(found.logits[i], logits, atol=2e-5)
    n = len(bag.mask)
    np.testing.assert_allclose(found.attention[i, :n], heat, atol=2e-6)
    np.testing.assert_array_equal(found.attention[i, n:], 0)


def same(one, two, i, j, order=slice(None)):
  """Bag i of output one equals bag j of output two."""
  for name in ('logits', 'slide_features'):
    np.testing.assert_allclose(
      getattr(one, name)[i], getattr(two, name)[j], atol=1e-6, err_msg=name
    )
  for name in one.aux:
    np.testing.assert_allclose(one.aux[name][i], two.aux[name][j], atol=1e-6)
  n = len((A, B)[i].mask)
  np.testing.assert_allclose(
    one.attention[i, :n][order], two.attention[j, :n], atol=1e-6
  )


def test_padding_batch_mates_and_order_of_patches_change_nothing():
  want = run(PAIR)
  np.testing.assert_allclose(want.attention.sum(-1), 1, atol=1e-6)
  same(want, run(poison(batch_bags([A], 48))), 0, 0)
  same(want, run(poison(batch_bags([slide(7, 9), B], 24))), 1, 1)
  same(want, run(poison(batch_bags([slide(7, 24), A], 24))), 0, 1)
  order = np.random.default_rng(0).permutation(len(A.mask))
  back = np.argsort(order).astype(np.int32)
  graph = PatchGraph(
    back[A.graph.nbr[order]], A.graph.emask[order], A.graph.rev[order]
  )
  graph = PatchGraph(
    np.where(graph.emask, graph.nbr, np.arange(len(back))[:, None]),
    graph.emask,
    graph.rev,
  )
  moved = Bag(A.features[order], A.mask, graph)
  same(want, run(poison(batch_bags([moved, B], 24))), 0, 0, order)


def test_packing_changes_nothing():
  want = run(PAIR)
  plan = plan_packing([len(A.mask), len(B.mask)], 40, 3)
  packed = pack_bags([A, B], plan)
  assert packed.num_segments == 3
  found = run(poison(packed))
  assert found.logits.shape == (1, 3, 3)
  for i, (slot, first, n) in enumerate(
    zip(plan.slot, plan.offset, plan.lengths, strict=True)
  ):
    np.testing.assert_allclose(found.logits[0, slot], want.logits[i], atol=1e-6)
    np.testing.assert_allclose(
      found.attention[0, first : first + n], want.attention[i, :n], atol=1e-6
    )
    for name, value in found.aux.items():
      np.testing.assert_allclose(value[0, slot], want.aux[name][i], atol=1e-6)
  # The third place is empty: the head's bias.
  bias = variables()['params']['readout']['head']['bias']
  np.testing.assert_allclose(found.logits[0, 2], bias, atol=1e-6)


@jax.jit
def slopes(p, batch, weight):
  """Value and gradient of sum_b weight_b (logits_b . (1, 2, 3))."""

  def loss(p):
    out = MODEL.apply(p, batch)
    aux = sum(jnp.sum(weight * x) for x in out.aux.values())
    return weight @ (out.logits @ jnp.arange(1.0, 4.0)) + aux

  return jax.value_and_grad(loss)(p)


def test_degenerate_bags_are_finite_and_silent():
  empty = pad_bag(A, 24).replace(mask=np.zeros(24, bool))
  empty = empty.replace(
    graph=PatchGraph(empty.graph.nbr, np.zeros((24, 4), bool), empty.graph.rev)
  )
  bags = [empty, slide(2, 1), isolated(3, 6), A]
  batch = poison(batch_bags(bags, 24))
  p = variables()
  grads = [
    slopes(p, batch, np.eye(4, dtype=np.float32)[b])[1] for b in range(4)
  ]
  for grad in grads:
    for leaf in jax.tree.leaves(grad):
      assert np.isfinite(leaf).all()
  # An empty bag says nothing about any patch.
  assert not np.any(grads[0]['params']['embed']['kernel'])
  # Patches without neighbours hear of no flux; they still react.
  for name in ('alpha', 'eta', 'exchange', 'theta'):
    assert np.abs(grads[2]['params'][name]).max() < 1e-7
    assert np.abs(grads[3]['params'][name]).max() > 1e-6
  assert np.abs(grads[2]['params']['reaction_kernel']).max() > 1e-6
  # Weights of bags add up, and a second run is the same to the last bit.
  total = slopes(p, batch, np.ones(4, np.float32))
  again = slopes(p, batch, np.ones(4, np.float32))
  jax.tree.map(np.testing.assert_array_equal, total, again)
  jax.tree.map(
    lambda x, *parts: np.testing.assert_allclose(x, sum(parts), atol=1e-5),
    total[1],
    *grads,
  )


def test_gradient_equals_differences_in_float64():
  with jax.enable_x64(True):
    model = MODEL.clone(dtype=jnp.float64, param_dtype=jnp.float64)
    bag = batch_bags([A], 16)
    bag = bag.replace(features=bag.features.astype(np.float64))
    p = jax.jit(model.init)(jax.random.key(0), bag)

    @jax.jit
    @jax.value_and_grad
    def loss(p):
      return jnp.sum(jnp.sin(model.apply(p, bag).logits))

    grad = loss(p)[1]['params']
    rng, eps = np.random.default_rng(0), 1e-5
    for name in ('tau', 'lam', 'alpha', 'theta', 'exchange', 'prototypes'):
      way = rng.normal(size=np.shape(grad[name]))
      move = lambda s, name=name, way=way: {
        'params': {**p['params'], name: p['params'][name] + s * way}
      }
      slope = (loss(move(eps))[0] - loss(move(-eps))[0]) / (2 * eps)
      found = float(np.sum(grad[name] * way))
      slope = float(slope)
      assert found == pytest.approx(slope, rel=1e-5, abs=1e-9), name
      assert slope != 0


@pytest.mark.parametrize(
  'options',
  [
    dict(reaction='relax', tau=0.8, lam=0.2),
    dict(reaction='allen_cahn', tau=0.4, lam=0.5),
    dict(reaction='relax', tau='learned', lam=0.5, flux='upwind'),
  ],
)
def test_the_step_stays_legal_while_everything_is_learned(options):
  model = MODEL.clone(**options)
  p = variables(model)
  k = 2 if options['reaction'] == 'allen_cahn' else 1
  row = 2 if 'flux' in options else 1

  def budget(p):
    """What the bound limits: tau (row + k lam) <= 1."""
    extras = model.apply(p, PAIR, trace=True).extras
    return extras['tau'] * (row + k * extras['lam'])

  optimizer = optax.adam(0.3)

  @jax.jit
  def train(p, state):
    # An adversary who wants the largest step and the fastest reaction.
    value, grad = jax.value_and_grad(lambda p: -budget(p))(p)
    updates, state = optimizer.update(grad, state)
    return optax.apply_updates(p, updates), state, -value

  state, values = optimizer.init(p), []
  for _ in range(100):
    p, state, value = train(p, state)
    values.append(float(value))
  assert max(values) <= 1 + 1e-6
  assert values[-1] > max(values[0], 0.99)


def test_uniform_control_is_plain_diffusion():
  model = TMEvolve(
    2, hidden=D, regions=R, num_concepts=M, steps=T, uniform=True
  )
  p = variables(model)
  # No table of regions or concepts in its dynamics.
  assert not {'theta', 'eta', 'exchange', 'gate_bias'} & set(p['params'])
  out = compiled(model, trace=True)(p, PAIR)
  still = compiled(model.clone(steps=0), trace=True)(p, PAIR)
  h0 = np.asarray(still.extras['hidden'][1, :20], np.float64)
  e = support.dense(B.graph)
  alpha = sigmoid(np.asarray(p['params']['alpha'], np.float64))
  tau = float(out.extras['tau'])
  assert tau == pytest.approx(0.9)
  h = h0
  for _ in range(T):
    h = h + tau * alpha * (e @ h - e.sum(1, keepdims=True) * h) / 4
  np.testing.assert_allclose(out.extras['hidden'][1, :20], h, atol=1e-6)
  assert np.abs(h - h0).max() > 0.05
  # Same width everywhere; the readout has the same shapes.
  full = variables()['params']['readout']
  shapes = lambda tree: jax.tree.map(jnp.shape, tree)
  assert shapes(full['attention']) == shapes(
    p['params']['readout']['attention']
  )


TEXT = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0][:3]
MODES = {
  'given concepts': dict(
    concept_mode='similarity',
    concept_matrix=TEXT,
    activation='sigmoid',
    reaction='allen_cahn',
    integrator='heun',
    same_region='bhattacharyya',
    reassign='every_step',
    edge_stopping=True,
    pooling='patch',
  ),
  'directed': dict(
    concept_mode='projected',
    concept_matrix=TEXT,
    flux='upwind',
    integrator='semi_implicit',
    tau=3.0,
    task='expression',
    refine_iters=0,
    dtype=jnp.bfloat16,
  ),
  'implicit': dict(
    concept_mode='none',
    reaction='fisher',
    integrator='imex_cg',
    tau=5.0,
    task='survival',
  ),
  'gaps': dict(
    reaction='zeldovich',
    tau='cfl',
    diffusion=False,
    concept_flux=False,
    degree=6,
  ),
}


def with_concepts(bag):
  rng = np.random.default_rng(0)
  text = rng.normal(size=(*bag.mask.shape, 4)).astype(np.float32)
  return bag.replace(concepts=text)


@pytest.mark.parametrize('name', MODES)
def test_modes(name):
  model = TMEvolve(3, hidden=D, regions=R, steps=2, **MODES[name])
  bag = with_concepts(PAIR)
  p = jax.jit(model.init)(jax.random.key(0), bag)

  @jax.jit
  def both(p):
    def loss(p):
      out = model.apply(p, bag, trace=True)
      return jnp.sum(out.logits**2), out

    return jax.grad(loss, has_aux=True)(p)

  grad, out = both(p)
  for leaf in jax.tree.leaves((grad, out)):
    assert np.isfinite(leaf).all()
  np.testing.assert_allclose(out.attention.sum(-1), 1, atol=1e-5)
  used = {
    k
    for k, x in grad['params'].items()
    if any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(x))
  }
  # Whatever has a parameter moves the prediction, except a second head.
  assert set(grad['params']) - used <= {'node_head'}
  z = out.extras['concepts'][0, :13]
  if name == 'given concepts':
    assert z.min() >= 0
    assert z.max() <= 1
  else:
    np.testing.assert_allclose(z.sum(-1), 1, atol=1e-5)
  assert out.extras['flux'].shape == (2, 3, 24)
  if name == 'implicit':
    assert out.extras['residual'].max() < 1e-3
  if name == 'directed':
    assert out.extras['node_outputs'].shape == (2, 24, 3)
    assert out.logits.dtype == jnp.float32


def test_rows_of_concepts_matter():
  model = MODEL.clone(concept_mode='similarity', concept_matrix=TEXT, steps=0)
  bag = with_concepts(PAIR)
  p = jax.jit(model.init)(jax.random.key(0), bag)
  shuffled = model.clone(concept_matrix=TEXT[[1, 2, 0]])
  one = jax.jit(model.apply)(p, bag).logits
  two = jax.jit(shuffled.apply)(p, bag).logits
  assert np.abs(one - two).max() > 1e-3
  with pytest.raises(ValueError, match='Q=4 columns but .* have 6'):
    jax.eval_shape(model.apply, p, PAIR)


def test_dropout_follows_the_keys_of_its_rows():
  model = MODEL.clone(dropout=0.5)
  keys = jax.random.split(jax.random.key(1), 2)
  f = jax.jit(
    lambda bag, keys: (
      model.apply(variables(), bag, train=True, dropout_keys=keys).logits
    )
  )
  one = f(PAIR, keys)
  other = poison(batch_bags([B, A], 24))
  np.testing.assert_allclose(f(other, keys[::-1])[::-1], one, atol=1e-6)
  assert np.abs(f(PAIR, keys[::-1]) - one).max() > 1e-3


def test_static_model_needs_no_graph_and_reads_none():
  model = MODEL.clone(steps=0)
  want = run(PAIR, model)
  found = compiled(model)(variables(model), PAIR.replace(graph=None))
  np.testing.assert_array_equal(found.logits, want.logits)
  with pytest.raises(ValueError, match='steps=3 needs a patch graph'):
    jax.eval_shape(MODEL.apply, variables(), PAIR.replace(graph=None))


def test_split_over_four_devices():
  """The options that other tests of split bags leave out."""
  model = TMEvolve(
    3, hidden=D, regions=R, num_concepts=M, steps=2, pooling='patch',
    integrator='imex_cg', tau=2.0,
  )  # fmt: skip
  ij = np.stack(np.divmod(np.arange(32), 4), -1).astype(np.int32)
  whole = slide(0, 32, 8, 4)
  assert len(ij) == len(whole.mask)
  bag = batch_bags([whole], 32)
  bag = bag.replace(mask=np.arange(32)[None] < 29)
  p = jax.jit(model.init)(jax.random.key(0), bag)
  want = jax.jit(model.apply)(p, bag)
  mesh = jax.make_mesh((4,), ('patch',), axis_types=(AxisType.Auto,))
  split = bag.replace(graph=shard_graph(bag.graph, 4, 'patch'))
  rows = Spec(None, 'patch')

  def local(p, bag):
    return model.apply(p, bag).replace(extras={})

  outputs = MILOutput(Spec(), rows, Spec(), Spec(), {})
  found = jax.jit(
    jax.shard_map(
      local, mesh=mesh, in_specs=(Spec(), rows), out_specs=outputs,
      check_vma=False,
    )
  )(p, split)  # fmt: skip
  np.testing.assert_allclose(found.logits, want.logits, atol=1e-5)
  np.testing.assert_allclose(found.attention, want.attention, atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    found.aux,
    want.aux,
  )
