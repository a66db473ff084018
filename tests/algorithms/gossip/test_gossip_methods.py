"""Methods of decentralized optimisation agree with their recursions on dense matrices."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dfl.comm.exchange import Net
from dfl.core.errors import InputError
from dfl.simulation.initialization import start
from dfl.simulation.prepared import Prepared
from tests.support.quadratic import H, centres, digits, final, info, quadratic, run_states, states

ROUNDS = 12
RATE = 0.1
DECAY = 0.7


class Dense:
    """A quadratic run on dense matrices: rates, mixing matrices and local steps.

    Attributes:
        X: (P, d), where the peers start.
        beta, K: momentum and local steps.
    """

    def __init__(self, setting: Prepared, beta: float, steps: int) -> None:
        self.X = start(setting.run, setting.task, True)
        self.C = centres(setting)
        self.weights = [torch.from_numpy(w.toarray()) for w in setting.network.schedule.weights]
        self.beta = beta
        self.K = steps

    def rounds(self) -> Iterator[tuple[Tensor, float]]:
        """Yield the mixing matrix and the learning rate of every round."""
        for t in range(ROUNDS):
            yield self.weights[t % len(self.weights)], RATE * DECAY**t

    def g(self, x: Tensor) -> Tensor:
        """The gradients of the peers."""
        return H * (x - self.C)

    def steps(
        self, x: Tensor, m: Tensor, lr: float, c: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """K steps m <- beta m + g + c, x <- x - lr m."""
        for _ in range(self.K):
            m = self.beta * m + self.g(x) + c
            x = x - lr * m
        return x, m


def dpsgd_atc(run: Dense) -> Tensor:
    X = run.X
    for W, lr in run.rounds():
        X = W @ run.steps(X, 0 * X, lr)[0]
    return X


def dpsgd_cta(run: Dense) -> Tensor:
    X = run.X
    for W, lr in run.rounds():
        X = W @ X + run.steps(X, 0 * X, lr)[0] - X
    return X


def dsgdm(run: Dense) -> Tensor:
    X, M = run.X, 0 * run.X
    for W, lr in run.rounds():
        Z, M = run.steps(X, M, lr)
        X = W @ Z
    return X


def qg_dsgdm(run: Dense) -> Tensor:
    X, M = run.X, 0 * run.X
    for W, lr in run.rounds():
        before, X = X, W @ run.steps(X, M, lr)[0]
        M = 0.75 * M + 0.25 * (before - X) / (run.K * lr)
    return X


def tracked(run: Dense, atc: bool) -> Tensor:
    """The tracker y of the corrected gradients, with the reach of the momentum by simulation."""
    X, c = run.X, 0 * run.X
    far = v = 0.0
    for _ in range(run.K):
        v = run.beta * v + 1
        far += v
    for W, lr in run.rounds():
        Z, _ = run.steps(X, 0 * X, lr, -c)
        g = (X - Z) / (lr * far) + c
        X, c = (W @ Z if atc else W @ X + Z - X), W @ (c - g) + g
    return X


def d2(run: Dense, lazy: bool = False) -> Tensor:
    X, memory = run.X, 0 * run.X
    for W, lr in run.rounds():
        Z, _ = run.steps(X, 0 * X, lr)
        mixing = (W + torch.eye(len(W))) / 2 if lazy else W
        X = mixing @ (Z + memory)
        memory = DECAY * (X - Z)  # the next round has this share of the learning rate
    return X


def momentum_tracking(run: Dense) -> Tensor:
    X, U, c = run.X, 0 * run.X, 0 * run.X
    for W, lr in run.rounds():
        Y, mean = X, 0 * X
        for _ in range(run.K):
            U = run.beta * U + run.g(Y)
            Y, mean = Y - lr * (U - c), mean + U / run.K
        X, c = W @ X + Y - X, W @ (c - mean) + mean
    return X


def decentlam(run: Dense) -> Tensor:
    """The heavy ball on averaged models: x'' = W z + beta (x' - x), rescaled with the rate."""
    X, ball = run.X, 0 * run.X
    for W, lr in run.rounds():
        Z = X
        for _ in range(run.K):
            Z = Z - lr * run.g(Z)
        before, X = X, W @ Z + run.beta * ball
        ball = DECAY * (X - before)
    return X


def dfedsam(run: Dense) -> Tensor:
    X = run.X
    for W, lr in run.rounds():
        M = 0 * X
        for _ in range(run.K):
            G = run.g(X)
            M = run.beta * M + run.g(X + 0.3 * G / G.norm(dim=1, keepdim=True))
            X = X - lr * M
        X = W @ X
    return X


ORACLES: dict[str, Callable[[Dense], Tensor]] = {
    "dpsgd": dpsgd_atc,
    "dpsgd:order=cta": dpsgd_cta,
    "dsgdm": dsgdm,
    "qg_dsgdm:mu=0.25": qg_dsgdm,
    "gradient_tracking": lambda run: tracked(run, atc=True),
    "gradient_tracking:order=cta": lambda run: tracked(run, atc=False),
    "d2": d2,
    "exact_diffusion": lambda run: d2(run, lazy=True),
    "momentum_tracking": momentum_tracking,
    "decentlam": decentlam,
    "dfedsam:rho=0.3": dfedsam,
}
METHODS = (*ORACLES,)
DESCENDING = tuple(each for each in METHODS if not each.startswith("dfedsam"))
"""Those whose steps are along the gradients at the models."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("topology", ["ring", "star", "exponential", "one_peer_exponential"])
@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (1, 0.9), (3, 0.0), (3, 0.9)])
def test_a_method_is_its_recursion(method: str, topology: str, steps: int, momentum: float) -> None:
    setting = quadratic(
        algorithm=method,
        topology=topology,
        momentum=momentum,
        local_epochs=None,
        local_steps=steps,
        lr=RATE,
        lr_schedule=f"exponential:decay={DECAY}",
        rounds=ROUNDS,
    )
    expected = ORACLES[method](Dense(setting, momentum, steps))
    assert torch.allclose(final(setting, ROUNDS), expected, rtol=0, atol=1e-10)


def after(method: str, **settings: Any) -> Tensor:
    given = {"topology": "exponential", "momentum": 0.9, **settings}
    return final(quadratic(algorithm=method, **given), ROUNDS)


def test_gradient_tracking_with_one_step_is_the_published_tracker() -> None:
    """x' = W (x - lr y) and y' = W y + g(x') - g(x), in either form of the correction."""
    setting = quadratic(algorithm="gradient_tracking", local_epochs=1, topology="ring")
    run = Dense(setting, 0.0, 1)
    W, X = run.weights[0], run.X
    Y = run.g(X)
    for _ in range(ROUNDS):
        before, X = X, W @ (X - RATE * Y)
        Y = W @ Y + run.g(X) - run.g(before)
    assert torch.allclose(final(setting, ROUNDS), X, rtol=0, atol=1e-12)


def test_d2_with_one_step_is_the_published_recursion() -> None:
    """X'' = W (2 X' - X - lr (G' - G))."""
    setting = quadratic(algorithm="d2", local_epochs=1, topology="ring")
    run = Dense(setting, 0.0, 1)
    W, before = run.weights[0], run.X
    X = W @ (before - RATE * run.g(before))
    for _ in range(ROUNDS - 1):
        before, X = X, W @ (2 * X - before - RATE * (run.g(X) - run.g(before)))
    assert torch.allclose(final(setting, ROUNDS), X, rtol=0, atol=1e-12)


def test_dpsgd_is_dfedavgm() -> None:
    for momentum, steps in ((0.0, 1), (0.9, 3)):
        more = {"momentum": momentum, "local_epochs": steps}
        assert torch.equal(after("dpsgd", **more), after("dfedavgm", **more))


@pytest.mark.parametrize("method", ["qg_dsgdm:mu=1", "dsgdm", "decentlam", "dfedsam:rho=0"])
def test_without_momentum_or_ascent_a_method_is_dpsgd(method: str) -> None:
    x, y = (after(each, momentum=0.0) for each in (method, "dpsgd"))
    assert torch.allclose(x, y, rtol=0, atol=1e-12)


def test_without_momentum_momentum_tracking_is_gradient_tracking() -> None:
    methods = ("momentum_tracking", "gradient_tracking:order=cta")
    x, y = (after(each, momentum=0.0) for each in methods)
    assert torch.allclose(x, y, rtol=0, atol=1e-12)


def test_exact_diffusion_is_d2_with_half_of_the_average() -> None:
    x = after("exact_diffusion", topology="ring", mixing="metropolis")
    y = after("d2", topology="ring", mixing="lazy")
    assert torch.allclose(x, y, rtol=0, atol=1e-12)


def test_all_peers_on_a_complete_graph_descend_the_mean() -> None:
    """With uniform weights and one step, every method without momentum is gradient descent."""
    for method in DESCENDING:
        given: dict[str, Any] = {"topology": "complete", "mixing": "uniform", "local_epochs": 1}
        setting = quadratic(algorithm=method, lr=RATE, momentum=0.0, **given)
        run = Dense(setting, 0.0, 1)
        mean = run.X.mean(0)
        for _ in range(ROUNDS):
            mean = mean - RATE * H * (mean - run.C.mean(0))
        found = final(setting, ROUNDS)
        assert torch.allclose(found.mean(0), mean, rtol=0, atol=1e-12), method


@pytest.mark.parametrize("method", METHODS)
def test_both_engines_agree(method: str) -> None:
    uneven = {"algorithm": method, "partition": "dirichlet:alpha=0.3", "weight_decay": 0.01}
    loop, batched = (final(digits(**uneven, engine=each), 4) for each in ("loop", "batched"))
    assert torch.allclose(loop, batched, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_does_not_change_the_state_before_it(method: str) -> None:
    setting = digits(algorithm=method)
    first = list(states(setting, 2))[-1]
    before = {name: value.clone() for name, value in vars(first).items()}
    once, twice = (
        setting.algorithm.round(first, setting.task, Net(setting.network, 2)) for _ in range(2)
    )
    for name, value in before.items():
        assert torch.equal(getattr(first, name), value)
        assert torch.equal(getattr(once, name), getattr(twice, name))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_sees_and_sends_the_shared_part_only(method: str) -> None:
    setting = digits(algorithm=method, share="first:1")
    shared, d = setting.task.parameter_layout.shared, setting.task.parameter_layout.d
    assert shared < d
    run_state = list(run_states(setting, 3))[-1]
    assert all(value.shape == (6, shared) for value in vars(run_state.state).values())
    first = start(setting.run, setting.task, False)
    assert all(
        (run_state.models - first).abs().amax(0)[part].max() > 0
        for part in (slice(shared), slice(shared, d))
    )


def test_personal_parameters_have_a_fresh_momentum_and_no_correction() -> None:
    """Where nothing is shared, every method is local training."""
    alone = final(digits(algorithm="dpsgd", share="nothing"), 3)
    for method in DESCENDING:
        models = final(digits(algorithm=method, share="nothing"), 3)
        same = method != "decentlam"  # whose local steps have no momentum
        assert torch.allclose(models, alone, rtol=0, atol=1e-5) == same


@pytest.mark.parametrize("method", ["gradient_tracking", "momentum_tracking"])
def test_corrections_add_up_to_zero_while_peers_are_down(method: str) -> None:
    setting = quadratic(algorithm=method, momentum=0.5, faults="outage:p=0.3,length=2+stragglers")
    for state in states(setting, 20):
        assert float(state.c.sum(0).abs().max()) < 1e-12
    assert float(state.c.abs().max()) > 0.01


@pytest.mark.parametrize("method", ["gradient_tracking", "momentum_tracking"])
def test_outages_on_a_directed_graph_are_refused_where_corrections_would_drift(method: str) -> None:
    quadratic(algorithm=method, topology="directed_exponential")
    with pytest.raises(InputError, match=r"--faults outage"):
        quadratic(algorithm=method, topology="directed_exponential", faults="outage")


@pytest.mark.parametrize("method", ["dpsgd", "dpsgd:order=cta", "dsgdm", "qg_dsgdm", "dfedsam"])
def test_a_peer_that_is_down_does_not_move(method: str) -> None:
    setting = quadratic(algorithm=method, momentum=0.9, faults="leave:peers=2,at=4")
    found = [state.x[2] for state in states(setting, 8)]
    assert not torch.equal(found[3], found[4])
    assert torch.equal(found[4], found[8])


def test_a_learning_rate_of_zero_is_refused_where_a_method_divides_by_it() -> None:
    for method in ("qg_dsgdm", "gradient_tracking", "d2", "momentum_tracking", "decentlam"):
        with pytest.raises(InputError, match="--lr-schedule"):
            quadratic(algorithm=method, lr_schedule=lambda t, rounds: float(t > 0))
    still = quadratic(algorithm="dsgdm", momentum=0.9, lr_schedule=lambda t, rounds: float(t > 0))
    assert bool(final(still, 5).isfinite().all())


def warnings(method: str, **settings: Any) -> list[str]:
    notes = info(quadratic(algorithm=method, **settings)).notes
    return [each for each in notes if "assumes" in each]


def test_d2_is_warned_of_at_its_limit_and_on_a_graph_that_changes() -> None:
    assert any("--mixing" in each for each in warnings("d2", topology="ring"))
    assert not warnings("d2", topology="ring", mixing="lazy")
    assert not warnings("exact_diffusion", topology="ring")
    for method in ("d2", "exact_diffusion"):
        changing = warnings(method, topology="one_peer_exponential")
        assert any("does not change" in each for each in changing)
    assert not warnings("gradient_tracking", topology="one_peer_exponential")


def test_every_method_states_its_memory() -> None:
    rows = {method: info(quadratic(algorithm=method)).method.rows for method in METHODS}
    assert rows == {
        "dpsgd": 0,
        "dpsgd:order=cta": 0,
        "dsgdm": 1,
        "qg_dsgdm:mu=0.25": 1,
        "gradient_tracking": 1,
        "gradient_tracking:order=cta": 1,
        "d2": 1,
        "exact_diffusion": 1,
        "momentum_tracking": 2,
        "decentlam": 1,
        "dfedsam:rho=0.3": 0,
    }


def test_methods_that_track_send_two_messages() -> None:
    one, two = (
        info(quadratic(algorithm=each)).payload_shared for each in ("dpsgd", "gradient_tracking")
    )
    assert two == 2 * one
