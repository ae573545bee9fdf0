r"""Unlearners for networks, as Methods of the shared loop.

All but Newton-CG are sums over examples of a loss that depends on the role of
the example, so that they are `gradient_method`s and inherit padding, sharding,
micro-batches and checkpoints:

  kind               retained example         forgotten example
  finetune           l                        0
  gradient_ascent    0                        -l
  graddiff           l                        -rho l
  neggrad_plus       beta l                   -(1 - beta) l
  scrub              labels l + teacher D     -forget D
  npo                retain l                 2/b log(1 + (p / p_ref)^b)
  random_label       l                        l at a random label
  corrected_relabel  l                        l at the outputs of the theory

with D the divergence from the start's outputs `batch['teacher']`. Every loss
also carries decay/2 ||th - prior||^2 per example (ridge / n, the ridge inside
the mean), except those that only look at the forget set.

Axes: B examples, C outputs, P parameters. A batch holds 'x', 'y' ([B, C] or
[B] int), 'forget' [B] (0 for retained examples, else a factor > 0 of the forget
term, usually 1), and where the kind needs them 'teacher' [B, C] (outputs of the
start) and 'target' [B, C] (outputs to be matched).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from tmlib.ops import linear
from tmlib.train import (
  Batch,
  Build,
  Evaluation,
  Method,
  Metrics,
  gradient_method,
)
from tmlib.unlearning.losses import Loss, get_loss

__all__ = [
  'KINDS',
  'NewtonState',
  'Weights',
  'needs',
  'newton_cg',
  'random_labels',
  'unlearner',
]

Apply = Callable[[Any, jax.Array], jax.Array]

# kind -> (uses retained examples, uses forgotten examples, batch keys)
KINDS: dict[str, tuple[bool, bool, tuple[str, ...]]] = {
  'finetune': (True, False, ()),
  'gradient_ascent': (False, True, ()),
  'graddiff': (True, True, ()),
  'neggrad_plus': (True, True, ()),
  'scrub': (True, True, ('teacher',)),
  'npo': (True, True, ('teacher',)),
  'random_label': (True, True, ()),
  'corrected_relabel': (True, True, ('target',)),
}


class Weights(NamedTuple):
  """Weights of the terms, for sum losses.

  Attributes:
    forget: rho of graddiff, and of D on the forget set in scrub; >= 0.
    beta: of neggrad_plus, in (0, 1]; the loss of R.
    labels: weight of the labels on R in scrub.
    teacher: weight of D on R in scrub.
    retain: weight of the loss on R in npo.
    temperature: b of npo, > 0.
  """

  forget: float = 0.1
  beta: float = 0.95
  labels: float = 1.0
  teacher: float = 1.0
  retain: float = 1.0
  temperature: float = 0.1


def needs(kind: str) -> tuple[bool, bool, tuple[str, ...]]:
  """Whether a kind reads R and F, and which further batch keys it needs."""
  if kind not in KINDS:
    raise ValueError(f'kind={kind!r}; allowed: {", ".join(KINDS)}.')
  return KINDS[kind]


def _check_weights(weights: Weights) -> None:
  if not 0 < weights.beta <= 1:
    raise ValueError(f'weights.beta={weights.beta} must be in (0, 1].')
  if not weights.temperature > 0:
    raise ValueError(f'weights.temperature={weights.temperature} must be > 0.')
  low = [k for k, v in weights._asdict().items() if v < 0]
  if low:
    raise ValueError(
      f'weights {low} are negative; the sign belongs to the method.'
    )


def _divergence(loss: Loss, f: jax.Array, reference: jax.Array) -> jax.Array:
  """D(reference || f) per example: KL for softmax, else half the square."""
  if loss.name != 'softmax':
    return 0.5 * jnp.sum((f - reference) ** 2, -1)
  log_p, log_q = jax.nn.log_softmax(reference), jax.nn.log_softmax(f)
  return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def _targets(batch: Batch, outputs: int) -> jax.Array:
  """Targets [B, C]; a label that C does not reach gives NaN, not zeros.

  Values cannot be checked inside jit; the guard of the loop names the metric.
  """
  y = batch['y']
  if not jnp.issubdtype(y.dtype, jnp.integer):
    return y
  known = (y >= 0) & (y < outputs) | (batch['weight'] == 0)
  return jnp.where(known[:, None], jax.nn.one_hot(y, outputs), jnp.nan)


def random_labels(key: jax.Array, ids: jax.Array, classes: int) -> jax.Array:
  """A uniform label per example that depends on key and id only; [B] int32."""
  draw = lambda i: jax.random.randint(
    jax.random.fold_in(key, i), (), 0, classes
  )
  return jax.vmap(draw)(ids)


def _terms(kind, loss, w, f, y, batch, label_key):
  """(loss on R [B], loss on F [B]) of a kind."""
  value = jax.vmap(loss.value)
  label = value(f, y)
  zero = jnp.zeros_like(label)
  if kind == 'finetune':
    return label, zero
  if kind == 'gradient_ascent':
    return zero, -label
  if kind == 'graddiff':
    return label, -w.forget * label
  if kind == 'neggrad_plus':
    return w.beta * label, -(1 - w.beta) * label
  if kind == 'scrub':
    far = _divergence(loss, f, batch['teacher'])
    return w.labels * label + w.teacher * far, -w.forget * far
  if kind == 'npo':
    ratio = value(batch['teacher'], y) - label
    b = w.temperature
    return w.retain * label, 2 / b * jax.nn.softplus(b * ratio)
  if kind == 'random_label':
    drawn = random_labels(label_key, batch['id'], f.shape[1])
    return label, value(f, jax.nn.one_hot(drawn, f.shape[1]))
  target = batch['target']
  if loss.name == 'softmax':
    target = jax.nn.softmax(target)
  return label, value(f, target)


def _distance(params: Any, prior: Any) -> jax.Array:
  if prior is None:
    return linear.tree_dot(params, params)
  difference = jax.tree.map(jnp.subtract, params, prior)
  return linear.tree_dot(difference, difference)


def unlearner(
  kind: str,
  apply_fn: Apply,
  loss: str | Loss,
  start: Any,
  optimizer: optax.GradientTransformation,
  *,
  weights: Weights | None = None,
  decay: float = 0.0,
  prior: Any = None,
  label_seed: int = 0,
  **options,
) -> Build:
  """A gradient-based unlearner as a Build.

  Args:
    kind: one of `KINDS`.
    apply_fn: (params, x [B, ...]) -> [B, C], deterministic.
    loss: 'softmax', 'square' or a Loss.
    start: params of the model that shall forget.
    optimizer: an Optax transformation.
    weights: of the terms; None for `Weights()`.
    decay: ridge / n, n the number of examples that the kind draws from; a
      batch that holds 'decay' [B] overrides it (each run has its own n). Not
      used by gradient_ascent, which sees no retain objective.
    prior: pytree the decay pulls to; None for zeros.
    label_seed: of the labels of random_label, which depend on it and the
      example's id only.
    **options: of `tmlib.train.make_update`.

  Returns:
    axis_name -> Method.

  Raises:
    ValueError: an unknown kind, weights out of range, and at the first batch
      keys that are missing from it.
  """
  _, _, keys = needs(kind)
  loss = get_loss(loss)
  weights = weights or Weights()
  _check_weights(weights)
  if not decay >= 0:
    raise ValueError(f'decay={decay} must be >= 0.')
  if kind == 'random_label' and loss.name != 'softmax':
    raise ValueError("random_label needs classes, that is loss='softmax'.")
  label_key = jax.random.key(label_seed)

  def loss_fn(params, batch, key, step):
    del key, step
    _require(kind, ('forget', *keys), batch)
    f = apply_fn(params, batch['x'])
    y = _targets(batch, f.shape[1])
    on_R, on_F = _terms(kind, loss, weights, f, y, batch, label_key)
    weight, forget = batch['weight'], batch['forget'] > 0
    value = jnp.where(forget, batch['forget'] * on_F, on_R)
    # where, not multiply: a padded row may hold anything.
    total = jnp.sum(jnp.where(weight > 0, weight * value, 0))
    size = jnp.sum(weight)
    if kind != 'gradient_ascent':
      share = jnp.sum(weight * batch.get('decay', decay))
      total += share / 2 * _distance(params, prior)
    label = jax.vmap(loss.value)(f, y)
    part = lambda chosen: (
      jnp.sum(jnp.where(chosen & (weight > 0), weight * label, 0)),
      jnp.sum(jnp.where(chosen, weight, 0)),
    )
    aux = {'forget_loss': part(forget), 'retain_loss': part(~forget)}
    return total, size, aux

  return gradient_method(
    lambda key, batch: jax.tree.map(jnp.asarray, start),
    loss_fn,
    lambda params, batch: _evaluate(apply_fn, loss, params, batch),
    optimizer,
    **options,
  )


def _require(kind, names, batch):
  missing = [k for k in names if k not in batch]
  if missing:
    raise ValueError(
      f'{kind}: the batch lacks {missing}; it has {sorted(batch)}. '
      "'teacher' holds the start's outputs, 'target' the corrected outputs."
    )


def _evaluate(apply_fn, loss, params, batch: Batch) -> Evaluation:
  f = apply_fn(params, batch['x'])
  y = _targets(batch, f.shape[1])
  value = jax.vmap(loss.value)(f, y)
  right = jnp.argmax(f, -1) == jnp.argmax(y, -1)
  weight = batch['weight']
  total = lambda x: (
    jnp.sum(jnp.where(weight > 0, weight * x, 0)),
    jnp.sum(weight),
  )
  sums = {'loss': total(value), 'accuracy': total(right.astype(f.dtype))}
  return {'sums': sums, 'outputs': {'logits': f, 'example_loss': value}}


class NewtonState(flax.struct.PyTreeNode):
  """State of Newton-CG.

  Attributes:
    step: [] int32.
    key: PRNG key; not used, the method has no chance in it.
    params: pytree.
  """

  step: jax.Array
  key: jax.Array
  params: Any


def _newton_system(apply_fn, loss, params, batch, target, decay, prior, total):
  """Gradient [P], v -> curvature v, params [P] and unravel of a Newton step.

  The curvature is that of R or of everything; `total` sums over devices.
  """
  flat, unravel = ravel_pytree(params)
  forget, weight = batch['forget'] > 0, batch['weight']
  bends = jnp.where(forget, 0, weight) if target == 'retain' else weight
  pulls = jnp.where(forget == (target == 'forget'), weight, 0)
  outputs = lambda v: apply_fn(unravel(v), batch['x'])
  y = _targets(batch, jax.eval_shape(outputs, flat).shape[1])
  ridge = total(jnp.sum(bends * batch.get('decay', decay)))

  def objective(v):
    value = jax.vmap(loss.value)(outputs(v), y)
    return jnp.sum(jnp.where(pulls > 0, pulls * value, 0))

  def curvature(f, u):
    product = jax.vmap(loss.curvature)(f, y, u)
    return jnp.where(bends[:, None] > 0, bends[:, None] * product, 0)

  def matvec(v):
    product = linear.ggn_product(outputs, curvature, flat, v)
    return total(product) + ridge * v

  grad = total(jax.grad(objective)(flat))
  if target == 'retain':
    grad = grad + ridge * (
      flat - (0 if prior is None else ravel_pytree(prior)[0])
    )
  return grad, matvec, flat, unravel


def newton_cg(
  apply_fn: Apply,
  loss: str | Loss,
  start: Any,
  *,
  target: str = 'retain',
  cg_steps: int = 20,
  tol: float = 1e-6,
  lr: float = 1.0,
  decay: float = 0.0,
  prior: Any = None,
) -> Build:
  """Newton steps by conjugate gradients on the Gauss-Newton curvature.

  target='retain': th <- th - lr A_R^{-1} grad L_R(th), the step of the theory
  (exact for linear models; the total gradient is in it). target='forget': the
  influence step th <- th + lr A^{-1} grad L_F(th), A of all data.

  One update sees one batch: give it the whole data for the step of the
  theory. Sums over the data axis are inside, so that jit and per-device mode
  agree.

  Args:
    apply_fn: (params, x [B, ...]) -> [B, C].
    loss: 'softmax', 'square' or a Loss.
    start: params.
    target: 'retain' or 'forget'.
    cg_steps: most CG steps per update, each one curvature product (which
      costs about two gradients).
    tol: relative residual at which CG stops.
    lr: step size.
    decay: ridge / n of the examples that enter the curvature, or
      `batch['decay']`.
    prior: pytree; None for zeros.

  Returns:
    axis_name -> Method. Metrics: grad_norm, cg_residual, cg_steps, curvature
    (<= 0 proves an indefinite operator).
  """
  loss = get_loss(loss)
  if target not in ('retain', 'forget'):
    raise ValueError(f"target={target!r}; allowed: 'retain', 'forget'.")
  if cg_steps < 1:
    raise ValueError(f'cg_steps={cg_steps} must be >= 1.')
  sign = -lr if target == 'retain' else lr

  def build(axis_name: str | None) -> Method:
    def total(x):
      return x if axis_name is None else jax.lax.psum(x, axis_name)

    def init(key, batch=None):
      params = jax.tree.map(jnp.asarray, start)
      return NewtonState(jnp.zeros((), jnp.int32), key, params)

    def update(state, batch) -> tuple[NewtonState, Metrics]:
      _require('newton_cg', ('forget',), batch)
      grad, matvec, flat, unravel = _newton_system(
        apply_fn, loss, state.params, batch, target, decay, prior, total
      )
      out = linear.cg(matvec, grad, max_steps=cg_steps, tol=tol)
      metrics = {
        'grad_norm': jnp.linalg.norm(grad),
        'cg_residual': out.residual,
        'cg_steps': out.steps,
        'curvature': out.curvature,
      }
      params = unravel(flat + sign * out.x)
      return state.replace(step=state.step + 1, params=params), metrics

    def evaluate(state, batch) -> Evaluation:
      return _evaluate(apply_fn, loss, state.params, batch)

    return Method(init, update, evaluate)

  return build
