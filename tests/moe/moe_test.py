"""Routers and experts against loops over tokens in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import special

from tmlib.moe import (
  MoELayer,
  balance_losses,
  expert_choice_route,
  expert_mlp,
  group_route,
  kept,
  parallel_expert_mlp,
  topk_route,
)
from tmlib.train.aot import collectives, topology_devices

EXACT = ('dense', 'scan', 'blocked', 'interpret', 'capacity')


def auto_mesh(axis):
  kind = jax.sharding.AxisType.Auto
  return jax.make_mesh((4,), (axis,), axis_types=(kind,))


def problem(tokens, features, hidden, experts, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(tokens, features))
  w_in = rng.normal(size=(experts, features, hidden)) / features**0.5
  w_out = rng.normal(size=(experts, hidden, features)) / hidden**0.5
  logits = rng.normal(size=(tokens, experts))
  return [jnp.asarray(v, jnp.float32) for v in (x, w_in, w_out, logits)]


def by_hand(x, w_in, w_out, weights, experts):
  """A loop over tokens, in float64."""
  x, w_in, w_out, weights = (
    np.asarray(v, np.float64) for v in (x, w_in, w_out, weights)
  )
  out = np.zeros_like(x)
  for t in range(len(x)):
    for w, e in zip(weights[t], np.asarray(experts[t]), strict=True):
      if e < len(w_in):
        out[t] += w * (np.tanh(x[t] @ w_in[e]) @ w_out[e])
  return out


@pytest.mark.parametrize(
  ('shape', 'k', 'skewed'),
  [
    ((37, 5, 9, 6), 2, False),
    ((37, 5, 9, 6), 2, True),  # experts without a token
    ((1, 3, 2, 4), 3, False),
    ((20, 8, 8, 3), 3, False),  # k = E
    ((16, 1, 1, 1), 1, False),  # one expert
    ((64, 4, 3, 7), 1, True),  # all tokens at one expert
  ],
)
def test_all_ways_equal_a_loop_over_tokens(shape, k, skewed):
  x, w_in, w_out, logits = problem(*shape)
  if skewed:
    logits = logits.at[:, 0].add(100.0)
  routing = topk_route(logits, k)
  want = by_hand(x, w_in, w_out, routing.weights, routing.experts)

  @jax.jit
  def all_ways(x, w_in, w_out):
    options = {'act': jnp.tanh, 'block': 8, 'capacity_factor': float(shape[3])}
    return {
      impl: expert_mlp(x, w_in, w_out, routing, impl=impl, **options)
      for impl in EXACT
    }

  found = all_ways(x, w_in, w_out)
  for impl, got in found.items():
    np.testing.assert_allclose(got, want, atol=1e-6, err_msg=impl)
    np.testing.assert_allclose(got, found['dense'], atol=1e-6, err_msg=impl)


@pytest.mark.parametrize('k', [1, 2, 4])
def test_gradients_agree_and_idle_experts_get_none(k):
  x, w_in, w_out, logits = problem(30, 6, 10, 4)
  logits = logits.at[:, 2].add(-50.0 if k < 4 else 0.0)

  def loss(x, w_in, w_out, logits, impl):
    routing = topk_route(logits, k)
    out = expert_mlp(
      x, w_in, w_out, routing, impl=impl, block=8, capacity_factor=4.0
    )
    return jnp.sin(out).sum()

  grad = jax.jit(jax.grad(loss, (0, 1, 2, 3)), static_argnums=4)
  want = grad(x, w_in, w_out, logits, 'dense')
  for impl in EXACT[1:]:
    got = grad(x, w_in, w_out, logits, impl)
    for a, b in zip(got, want, strict=True):
      scale = np.abs(b).max() or 1.0
      np.testing.assert_allclose(a / scale, b / scale, atol=1e-6, err_msg=impl)
    if k < 4:
      np.testing.assert_array_equal(got[1][2], 0)
      np.testing.assert_array_equal(got[2][2], 0)


def test_padding_and_its_nan_reach_nobody():
  x, w_in, w_out, logits = problem(12, 5, 6, 3)
  mask = jnp.arange(12) < 9
  clean = topk_route(logits[:9], 2)
  want = expert_mlp(x[:9], w_in, w_out, clean, impl='dense')
  routing = topk_route(jnp.where(mask[:, None], logits, jnp.nan), 2, mask=mask)
  dirty = jnp.where(mask[:, None], x, jnp.nan)
  for impl in EXACT:
    got = expert_mlp(
      dirty, w_in, w_out, routing, impl=impl, block=8, capacity_factor=9.0
    )
    np.testing.assert_allclose(got[:9], want, atol=1e-6, err_msg=impl)
    np.testing.assert_array_equal(got[9:], 0, err_msg=impl)
  losses = balance_losses(routing, jnp.where(mask[:, None], logits, jnp.nan))
  for name, value in balance_losses(clean, logits[:9]).items():
    np.testing.assert_allclose(losses[name], value, rtol=1e-5, err_msg=name)


def test_nan_of_padding_reaches_no_gradient():
  x, w_in, w_out, logits = problem(12, 5, 6, 3)
  mask = jnp.arange(12) < 9
  dirty = lambda a: jnp.where(mask[:, None], a, jnp.nan)

  def loss(x, w_in, w_out, logits, mask, impl):
    routing = topk_route(logits, 2, mask=mask)
    out = expert_mlp(
      x, w_in, w_out, routing, impl=impl, block=8, capacity_factor=9.0
    )
    return jnp.sin(out).sum() + balance_losses(routing, logits)['gshard']

  grad = jax.jit(jax.grad(loss, (0, 1, 2, 3)), static_argnums=5)
  want = grad(x[:9], w_in, w_out, logits[:9], mask[:9], 'dense')
  for impl in EXACT:
    got = grad(dirty(x), w_in, w_out, dirty(logits), mask, impl)
    for a, b in zip(got, want, strict=True):
      if a.shape != b.shape:  # of tokens
        np.testing.assert_array_equal(a[9:], 0, err_msg=impl)
        a = a[:9]
      np.testing.assert_allclose(
        a, b, atol=1e-6 * np.abs(b).max(), err_msg=impl
      )


def test_nan_of_padding_reaches_no_gradient_of_any_router():
  logits = problem(6, 1, 1, 3)[3]
  mask = jnp.arange(6) < 4
  groups = jnp.arange(6) // 2

  def loss(logits, mask, groups):
    return sum(
      (r.weights * r.weights).sum() + (r.probs * r.probs).sum()
      for r in (
        topk_route(logits, 2, mask=mask, normalize='pre'),
        expert_choice_route(logits, 2, mask=mask),
        group_route(logits, groups, 3, 2, mask=mask),
      )
    )

  grad = jax.grad(loss)
  got = grad(jnp.where(mask[:, None], logits, jnp.nan), mask, groups)
  want = grad(logits[:4], mask[:4], groups[:4])
  np.testing.assert_allclose(got[:4], want, rtol=1e-5, atol=1e-7)
  np.testing.assert_array_equal(got[4:], 0)


def test_topk_by_hand():
  logits = jnp.asarray([[0.0, np.log(3.0), 0.0, -9.0]])
  after = topk_route(logits, 2)
  # Ties go to the lower index.
  np.testing.assert_array_equal(after.experts, [[1, 0]])
  np.testing.assert_allclose(after.weights, [[0.75, 0.25]], rtol=1e-6)
  before = topk_route(logits, 2, normalize='pre')
  rest = 5 + np.exp(-9.0)
  np.testing.assert_allclose(before.weights, [[3 / rest, 1 / rest]], rtol=1e-6)
  biased = topk_route(logits, 1, bias=jnp.asarray([0, 0, 0, 20.0]))
  np.testing.assert_array_equal(biased.experts, [[3]])
  np.testing.assert_allclose(biased.weights, [[1.0]])


def test_half_precision_logits_are_routed_in_single():
  logits = jnp.asarray([[1.0, 1.0 + 2**-7, 0.0]], jnp.bfloat16)
  routing = topk_route(logits, 2)
  assert routing.weights.dtype == jnp.float32
  want = special.softmax([1.0 + 2**-7, 1.0])
  np.testing.assert_allclose(routing.weights[0], want, rtol=1e-6)


def test_expert_choice_equals_its_definition():
  x, w_in, w_out, logits = problem(10, 5, 6, 3)
  mask = jnp.arange(10) < 8
  routing = expert_choice_route(logits, 4, mask=mask)
  probs = special.softmax(np.asarray(logits, float), 1)
  want = np.zeros((10, 5))
  for e in range(3):
    chosen = np.argsort(-probs[:8, e], kind='stable')[:4]
    np.testing.assert_array_equal(routing.tokens[e], chosen)
    for t in chosen:
      h = np.tanh(np.asarray(x[t], float) @ np.asarray(w_in[e], float))
      want[t] += probs[t, e] * (h @ np.asarray(w_out[e], float))
  for impl in ('auto', 'dense', 'scan'):
    got = expert_mlp(x, w_in, w_out, routing, act=jnp.tanh, impl=impl)
    np.testing.assert_allclose(got, want, atol=1e-6, err_msg=impl)
  few = expert_choice_route(logits, 9, mask=mask)
  assert (np.asarray(few.tokens) == 10).sum() == 3  # one empty slot each


def test_a_group_shares_its_experts():
  _, _, _, logits = problem(9, 2, 2, 4)
  groups = jnp.asarray([0, 0, 1, 1, 1, 2, 2, 2, 2])
  mask = jnp.asarray([1, 1, 1, 1, 0, 1, 1, 1, 1], bool)
  routing = group_route(logits, groups, 4, 2, mask=mask)
  own = np.asarray(logits)[2:4].mean(0)
  np.testing.assert_array_equal(routing.experts[2], np.argsort(-own)[:2])
  np.testing.assert_array_equal(routing.experts[2], routing.experts[3])
  np.testing.assert_array_equal(routing.experts[4], [4, 4])
  np.testing.assert_array_equal(routing.weights[4], [0, 0])


def test_a_group_out_of_range_is_refused_or_padding_under_jit():
  logits = problem(4, 1, 1, 3)[3]
  groups = jnp.asarray([0, 5, -1, 1])
  with pytest.raises(ValueError, match=r'groups holds 5 at token 1.*\[0, 2\)'):
    group_route(logits, groups, 2, 1)
  ok = jnp.asarray([True, False, False, True])
  want = group_route(logits, groups, 2, 1, mask=ok)  # padding may be anything
  np.testing.assert_array_equal(want.experts[~ok], [[3], [3]])
  own = topk_route(logits[ok], 1)
  np.testing.assert_array_equal(want.experts[ok], own.experts)
  np.testing.assert_allclose(want.probs[ok], own.probs, rtol=1e-6)
  got = jax.jit(lambda g: group_route(logits, g, 2, 1))(groups)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_full_experts_turn_second_choices_away_first():
  # All tokens want expert 0 first, expert 1 second, and there are two slots.
  logits = jnp.tile(jnp.asarray([[3.0, 2.0, 0.0]]), (4, 1))
  logits = logits.at[3].set(jnp.asarray([2.0, 3.0, 0.0]))
  found = kept(topk_route(logits, 2), 2)
  # Expert 0: tokens 0, 1. Expert 1: the first choice of token 3, then token 0.
  want = [[True, True], [True, False], [False, False], [True, False]]
  np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize('manual', [False, True])
def test_expert_parallel_equals_one_device(manual):
  x, w_in, w_out, logits = problem(24, 6, 8, 8)
  mask = jnp.arange(24) != 5
  mesh = auto_mesh('expert')

  def one(x, w_in, w_out):
    routing = topk_route(logits, 2, mask=mask)
    return expert_mlp(x, w_in, w_out, routing, impl='dense')

  def many(x, w_in, w_out):
    if not manual:
      routing = topk_route(logits, 2, mask=mask)
      return parallel_expert_mlp(x, w_in, w_out, routing, axis='expert')[0]

    def local(x, w_in, w_out, logits, mask):
      routing = topk_route(logits, 2, mask=mask)
      return parallel_expert_mlp(x, w_in, w_out, routing, axis='expert')[0]

    split = jax.shard_map(
      local, in_specs=P('expert'), out_specs=P('expert'), check_vma=False
    )
    return split(x, w_in, w_out, logits, mask)

  loss = lambda f: lambda *a: jnp.sin(f(*a)).sum()
  want, dwant = (
    one(x, w_in, w_out),
    jax.grad(loss(one), (0, 1, 2))(x, w_in, w_out),
  )
  with jax.set_mesh(mesh):
    got = jax.jit(many)(x, w_in, w_out)
    dgot = jax.jit(jax.grad(loss(many), (0, 1, 2)))(x, w_in, w_out)
  np.testing.assert_allclose(got, want, atol=1e-6)
  for a, b in zip(dgot, dwant, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize('tokens', [24, 23])
def test_tokens_split_over_devices_stay_where_they_are(tokens):
  x, w_in, w_out, logits = problem(tokens, 6, 8, 3)

  def loss(x, w_in, w_out, impl):
    out = expert_mlp(x, w_in, w_out, topk_route(logits, 2), impl=impl, block=8)
    return jnp.sin(out).sum()

  grad = jax.value_and_grad(loss, (0, 1, 2))
  want = jax.jit(grad, static_argnums=3)(x, w_in, w_out, 'dense')
  with jax.set_mesh(auto_mesh('data')):
    found = jax.jit(grad, static_argnums=3)
    got = found(x, w_in, w_out, 'blocked')
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_a_data_parallel_layer_compiles_for_a_tpu_slice_without_a_gather():
  pytest.importorskip('libtpu')
  kinds = {'axis_types': (jax.sharding.AxisType.Auto,)}
  mesh = jax.sharding.Mesh(
    np.array(topology_devices('v5e:2x2')), ('data',), **kinds
  )
  struct = lambda spec, *s: jax.ShapeDtypeStruct(
    s, jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec)
  )

  def loss(x, w_in, w_out, logits):
    out = expert_mlp(x, w_in, w_out, topk_route(logits, 2))
    return (out**2).sum()

  with jax.set_mesh(mesh):
    lowered = (
      jax.jit(jax.grad(loss, (1, 2)))
      .trace(
        struct(P('data'), 4096, 128),
        struct(P(), 8, 128, 256),
        struct(P(), 8, 256, 128),
        struct(P('data'), 4096, 8),
      )
      .lower(lowering_platforms=('tpu',))
    )
    text = lowered.compile().as_text()
  assert text.count('custom_call_target="tpu_custom_call"') >= 4
  assert 'all-gather' not in collectives(text)


def test_expert_parallel_reports_what_it_dropped():
  x, w_in, w_out, logits = problem(16, 4, 4, 4)
  logits = logits.at[:, 0].add(50.0)  # each device has one slot per expert
  with jax.set_mesh(auto_mesh('expert')):
    routing = topk_route(logits, 1)
    _, dropped = parallel_expert_mlp(
      x, w_in, w_out, routing, axis='expert', capacity_factor=1.0
    )
    assert int(dropped) == 12
    with pytest.raises(ValueError, match='3 experts cannot be split'):
      parallel_expert_mlp(
        x, w_in[:3], w_out[:3], topk_route(logits[:, :3], 1), axis='expert'
      )
  with pytest.raises(ValueError, match='ambient mesh'):
    parallel_expert_mlp(x, w_in, w_out, routing, axis='expert')


def test_expert_parallel_on_a_tpu_slice_gathers_no_tokens():
  pytest.importorskip('libtpu')
  mesh = jax.sharding.Mesh(np.array(topology_devices('v5e:2x2')), ('expert',))
  split = jax.sharding.NamedSharding(mesh, P('expert'))
  struct = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=split)

  def loss(x, w_in, w_out, logits):
    routing = topk_route(logits, 2)
    y, _ = parallel_expert_mlp(
      x, w_in, w_out, routing, axis='expert', capacity_factor=1.25
    )
    return (y**2).sum()

  with jax.set_mesh(mesh):
    lowered = (
      jax.jit(jax.grad(loss, (0, 1, 2)))
      .trace(
        struct(4096, 128),
        struct(16, 128, 256),
        struct(16, 256, 128),
        struct(4096, 16),
      )
      .lower(lowering_platforms=('tpu',))
    )
    found = collectives(lowered.compile().as_text())
  assert 'all-to-all' in found
  assert 'all-gather' not in found


class TestBadInput:
  def test_routers(self):
    logits = jnp.zeros((4, 3))
    for k in (0, 4):
      with pytest.raises(ValueError, match=rf'k={k} must lie in \[1, 3\]'):
        topk_route(logits, k)
    with pytest.raises(ValueError, match='needs a key'):
      topk_route(logits, 1, noise_std=1.0)
    routing = topk_route(logits, 1)
    for noise in (np.nan, -1.0, np.inf):
      with pytest.raises(ValueError, match=f'noise_std={noise} must be'):
        topk_route(logits, 1, noise_std=noise, key=jax.random.key(0))
      with pytest.raises(ValueError, match=f'noise_std={noise} must be'):
        balance_losses(routing, logits, noise_std=noise)
    with pytest.raises(ValueError, match='normalize'):
      topk_route(logits, 1, normalize='both')
    with pytest.raises(ValueError, match='both balance'):
      topk_route(
        logits, 1, bias=jnp.zeros(3), noise_std=1.0, key=jax.random.key(0)
      )
    with pytest.raises(ValueError, match='no expert'):
      topk_route(jnp.zeros((4, 0)), 1)
    with pytest.raises(ValueError, match='capacity=5'):
      expert_choice_route(logits, 5)

  def test_experts(self):
    x, w_in, w_out, logits = problem(4, 3, 5, 2)
    routing = topk_route(logits, 1)
    with pytest.raises(ValueError, match='impl='):
      expert_mlp(x, w_in, w_out, routing, impl='fast')
    with pytest.raises(ValueError, match='w_out of shape'):
      expert_mlp(x, w_in, w_in, routing)
    with pytest.raises(ValueError, match='features'):
      expert_mlp(x[:, :2], w_in, w_out, routing)
    with pytest.raises(ValueError, match='routing is for'):
      expert_mlp(x[:2], w_in, w_out, routing)
    for impl in ('auto', 'capacity', 'dense'):
      for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=f'capacity_factor={bad} must be'):
          expert_mlp(x, w_in, w_out, routing, impl=impl, capacity_factor=bad)

  @pytest.mark.parametrize('router', ['token', 'expert'])
  @pytest.mark.parametrize(
    ('fields', 'message'),
    [
      ({'num_experts': 0}, 'num_experts=0'),
      ({'hidden': 0}, 'hidden=0'),
      ({'k': 0}, r'k=0 must lie in \[1, 4\]'),
      ({'k': 9}, r'k=9 must lie in \[1, 4\]'),
      ({'noise_std': np.nan}, 'noise_std=nan'),
      ({'capacity_factor': 0.0}, 'capacity_factor=0.0'),
      ({'impl': 'fast'}, "impl='fast'"),
    ],
  )
  def test_layers(self, router, fields, message):
    layer = MoELayer(**{'num_experts': 4, 'hidden': 3, **fields}, router=router)
    shape = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(layer.init, jax.random.key(0), shape)

  def test_an_unknown_router(self):
    with pytest.raises(ValueError, match="router='tokens'"):
      MoELayer(2, 3, router='tokens').init(jax.random.key(0), jnp.ones((4, 3)))
