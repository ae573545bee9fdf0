"""The same numbers as two other libraries, where definitions match.

MFGLib 0.3.0, Environment.beach_bar(T=4, n=5, bar_loc=2), float64, from the
uniform policy. Its horizon counts from 0, so H = T + 1; its line has walls and
its noise is one more step with probability 1/2; the cost of a move is 1 / n.

bench-mfg-suite 0.1.3, LasryLionsChain of 5 states, discount .8: its values
after 400 sweeps are those of the infinite horizon, its flow after 2000 the
stationary one. Its SIS and congestion games roll 100 equally likely numbers
against a probability, ours use the probability: they agree only up to 1 / 100.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmlib import mean_field as mf

UNIFORM = 3.1818535165435473
FICTITIOUS = (0.7270700147817415, 0.33903831771222714, 0.23241142398699477,
              0.19479184401567728, 0.16498838500791768)  # fmt: skip
MIRROR = (2.788784208760995, 2.455523783157293, 2.1733408050240537,
          1.9341385373391204, 1.7307814930891796)  # fmt: skip
BOLTZMANN = (1.631830863300018, 2.0178446101545866, 1.896758188663817,
             1.9322475512327273, 1.9216475506336206)  # fmt: skip


def beach():
  cells, move = np.arange(5), np.array([-1, 0, 1])
  idx = np.clip(cells[:, None, None] + move[:, None] + move, 0, 4)
  prob = np.broadcast_to([0.25, 0.5, 0.25], idx.shape)
  base = -np.array([2.0, 1, 0, 1, 2])[:, None] - np.abs(move) / 5

  def reward(mu, t):
    del t
    return jnp.asarray(base) - jnp.log(mu + 1e-20)[:, None]

  return mf.MFGame(idx, prob, reward, np.full(5, 0.2), 5)


@pytest.mark.parametrize(
  ('call', 'want'),
  [
    (lambda g: mf.fictitious_play(g, 5), FICTITIOUS),
    (lambda g: mf.online_mirror_descent(g, 5, lr=0.1), MIRROR),
    (lambda g: mf.prior_descent(g, 5, 2.0, inner=100), BOLTZMANN),
  ],
  ids=['fictitious', 'mirror', 'boltzmann'],
)
def test_solvers_of_mfglib(call, want):
  with jax.enable_x64(True):
    game = beach()
    uniform = float(mf.exploitability(game, mf.uniform_policy(game)))
    assert abs(uniform - UNIFORM) < 1e-10
    np.testing.assert_allclose(call(game).exploitability, want, atol=1e-10)


def test_stationary_chain_of_bench_mfg_suite():
  pi = np.array(
    [
      [0.39546198954297845, 0.5930180594914135, 0.011519950965607977],
      [0.0010397580548109561, 0.25215560168911316, 0.7468046402560758],
      [0.15865173381980024, 0.17789920231940143, 0.6634490638607984],
      [0.6482021419113102, 0.35166006400659455, 0.00013779408209523564],
      [0.6652300066862088, 0.021254131078561812, 0.31351586223522954],
    ]
  )
  mu = [0.12222088755763952, 0.11336422861580943, 0.3498526761227133,
        0.35507546474133095, 0.05948674296250676]  # fmt: skip
  game = mf.envs.lasry_lions_chain(5, aversion=4.0, discount=0.8)
  with jax.enable_x64(True):
    np.testing.assert_allclose(mf.push(game, pi), mu, atol=1e-12)
    gap = float(mf.exploitability(game, pi))
  assert abs(gap - 2.2926378373874248) < 1e-10
