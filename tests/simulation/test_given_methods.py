"""Methods that `Run` takes as objects: what they state, and the states that they return."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import dfl
from dfl.algorithms.gossip.dfedavgm import DFedAvgM, State
from dfl.algorithms.local_and_pooled import Pooled
from dfl.algorithms.server.fedavg import FedAvg
from dfl.algorithms.server.fltrust import FLTrust
from dfl.comm.mpi import World
from dfl.simulation.prepare import prepare
from tests.support.given import DATA, Lagged, last, refused, small
from tests.support.quadratic import info
from tests.support.stopping import crash


def test_a_method_of_ones_own() -> None:
    assert last(small(algorithm=Lagged())) == last(small())
    still = last(small(algorithm=Lagged(beta=0.0)))
    assert (still["consensus_distance"], still["payload_bytes"]) == (
        0,
        last(small())["payload_bytes"],
    )


class Plain(DFedAvgM):
    applies = ()


@pytest.mark.parametrize("settings", [{"bits": 4}, {"aggregator": "median"}])
def test_a_method_of_ones_own_states_what_it_applies(settings: dict[str, Any]) -> None:
    line = refused(lambda: small(algorithm=Plain(), **settings))
    assert " has no part in --algorithm Plain(): leave it out" in line
    assert "`applies`" in line
    assert "`applies`" not in refused(lambda: small(algorithm="local_only", **settings))


class ByMedian(DFedAvgM):
    default_aggregator = "median"


class ServerByMedian(FedAvg):
    default_aggregator = "median"


@pytest.mark.parametrize(
    ("own", "base"), [(ByMedian(), DFedAvgM()), (ServerByMedian(), FedAvg())], ids=repr
)
def test_a_method_with_its_own_default_aggregator_takes_others(own: Any, base: Any) -> None:
    assert last(small(algorithm=own)) == last(small(algorithm=base, aggregator="median"))
    for rule in ("mean", "trimmed_mean:f=1"):
        given = small(algorithm=own, aggregator=rule)
        assert last(given) == last(small(algorithm=base, aggregator=rule))


class Trusting(FLTrust):
    pass


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": Trusting(), "aggregator": "median"},
        {"algorithm": ServerByMedian(), "aggregator": "fltrust"},
    ],
)
def test_a_rule_refused_for_its_reference_has_no_advice(
    settings: dict[str, Any],
) -> None:
    """The method states that it applies an aggregator: the reason is the reference of a rule."""
    line = refused(lambda: small(**settings))
    assert " has no part in --algorithm " in line
    assert "`applies`" not in line


def copies(labels: NDArray[np.int64], classes: int, rng: np.random.Generator) -> Any:
    return np.arange(len(labels))


setattr(copies, "peers_keep", True)  # noqa: B010  a function's type has no such attribute


class Copying(Pooled):
    """Trains on the pooled examples by a rule of its own."""

    @property
    def server_data_rule(self) -> Any:
        return copies


def test_a_rule_of_ones_own_lets_the_peers_keep_their_examples() -> None:
    given = {"partition": [np.arange(16 * i, 16 * i + 16) for i in range(6)], "dataset": DATA}
    for settings in ({}, {"validation": 0.25}, given):
        own, built_in = (small(algorithm=each, **settings) for each in (Copying(), "pooled"))
        assert last(own) == last(built_in)


class Bare(NamedTuple):
    x: Tensor


class Undressed(DFedAvgM):
    def init(self, x: Tensor, copies: Tensor, net: Any) -> Any:
        return Bare(x)


def test_a_state_is_a_dataclass() -> None:
    message = refused(lambda: small(algorithm=Undressed()))
    assert "--algorithm" in message
    assert "Bare" in message


@dataclass(frozen=True)
class Kept:
    x: Tensor
    kept: Any


@dataclass(frozen=True, kw_only=True)
class Returning(DFedAvgM):
    """DFedAvgM whose states are made by functions of the models."""

    begun: Any = State
    after: Any = State

    def init(self, x: Tensor, copies: Tensor, net: Any) -> Any:
        return self.begun(x)

    def round(self, state: Any, task: Any, net: Any) -> Any:
        return self.after(super().round(state, task, net).x)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Returning(begun=lambda x: x), "what init returns must be a frozen dataclass"),
        (Returning(begun=lambda x: State(x[0])), "what init returns: x must be Tensor of float32"),
        (Returning(begun=lambda x: State(x.double())), "what init returns: x must be Tensor of"),
        *(
            (Returning(begun=partial(Kept, kept=kept)), "what init returns: kept must be a tensor")
            for kept in (3, None, (), np.zeros(3), torch.tensor(3))
        ),
        (Returning(after=lambda z: None), "what round returns must be a frozen dataclass"),
        (Returning(after=lambda z: z), "what round returns must be a frozen dataclass"),
        (Returning(after=lambda z: State(z[0])), "what round returns: x must be Tensor of float32"),
        (Returning(after=lambda z: State(z[:1])), "what round returns: x must be Tensor of"),
        (Returning(after=lambda z: State(z.double())), "what round returns: x must be Tensor of"),
        (Returning(after=lambda z: Kept(z, z)), "what round returns must be a frozen dataclass"),
        (Returning(after=lambda z: Kept(z, 3)), "what round returns must be a frozen dataclass"),
    ],
)
def test_a_state_has_tensors_of_one_form(method: Returning, wanted: str) -> None:
    line = refused(lambda: small(algorithm=method))
    assert line.startswith("--algorithm own:Returning")
    assert wanted in line


@dataclass(frozen=True)
class Longer(Kept):
    more: Tensor


@dataclass
class Loose:
    """A state that is changed in place."""

    x: Tensor
    kept: Any


@dataclass(frozen=True, kw_only=True)
class Changing(DFedAvgM):
    """Has a second field, and another state from round 3 on."""

    changed: Any

    def init(self, x: Tensor, copies: Tensor, net: Any) -> Any:
        return Kept(x, torch.zeros_like(x))

    def round(self, state: Any, task: Any, net: Any) -> Any:
        assert net.t < 4
        x = super().round(state, task, net).x
        return Kept(x, state.kept) if net.t < 3 else self.changed(state, x)


class Widening(DFedAvgM):
    """Changes its state in place in round 3."""

    def init(self, x: Tensor, copies: Tensor, net: Any) -> Any:
        return Loose(x, torch.zeros_like(x))

    def round(self, state: Any, task: Any, net: Any) -> Any:
        assert net.t < 4
        state.x = super().round(state, task, net).x
        if net.t == 3:
            state.kept = state.kept.double()
        return state


FORM = "kept must be Tensor of float32"
FIELDS = "must be a frozen dataclass of tensors with the fields that init returns, x, kept, not "


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Changing(changed=lambda state, x: Kept(x, None)), FORM),
        (Changing(changed=lambda state, x: Kept(x, state.kept[:1])), FORM),
        (Changing(changed=lambda state, x: Kept(x, state.kept.double())), FORM),
        (Changing(changed=lambda state, x: Kept(x, state.kept[:, 1:])), FORM),
        (Changing(changed=lambda state, x: Kept(x[:1], state.kept)), "x must be Tensor"),
        (
            Changing(changed=lambda state, x: Longer(x, state.kept, x)),
            f"{FIELDS}a value of type Longer",
        ),
        (Changing(changed=lambda state, x: State(x)), f"{FIELDS}a value of type State"),
        (Changing(changed=lambda state, x: None), f"{FIELDS}None"),
        (Widening(), FORM),
    ],
)
def test_a_state_has_the_same_form_in_every_round(method: DFedAvgM, wanted: str) -> None:
    """It is refused in the round that returns it, also where that is not evaluated."""
    line = refused(lambda: small(algorithm=method, rounds=6, eval_every=6))
    assert "what round returns" in line
    assert wanted in line


class Sending(DFedAvgM):
    """The peers average before round 0."""

    def init(self, x: Tensor, copies: Tensor, net: Any) -> State:
        return State(net.exchange(x).average())


class Raising(DFedAvgM):
    def init(self, x: Tensor, copies: Tensor, net: Any) -> State:
        raise KeyError("x")


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Sending(), "--algorithm: init sends messages, which round alone may"),
        (Raising(), "--algorithm: init fails: KeyError: 'x'"),
    ],
)
def test_init_only_makes_a_state(method: DFedAvgM, wanted: str) -> None:
    assert refused(lambda: small(algorithm=method)) == wanted


@dataclass(frozen=True, kw_only=True)
class Exchanging(DFedAvgM):
    """Models as they are received, of messages that a function makes of the models."""

    sent: Any
    per_edge: bool = False

    def round(self, state: Any, task: Any, net: Any) -> Any:
        return State(net.exchange(self.sent(state.x), per_edge=self.per_edge).average())


@dataclass(frozen=True, kw_only=True)
class Uploading(FedAvg):
    """FedAvg whose clients send one row too few."""

    def round(self, state: Any, task: Any, net: Any) -> Any:
        net.collect(state.x[:0], net.everyone)
        return super().round(state, task, net)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Exchanging(sent=lambda x: x[0]), "must be Tensor (6, m), not Tensor of float32 (28,)"),
        (Exchanging(sent=lambda x: x.numpy()), "must be Tensor (6, m), not ndarray of float32"),
        (Exchanging(sent=lambda x: x, per_edge=True), "must be Tensor (12, m), not Tensor of"),
        (Uploading(), "must be Tensor (6, m), not Tensor of float32 (0, 28)"),
    ],
)
def test_messages_have_a_row_each(method: Any, wanted: str) -> None:
    line = refused(lambda: small(algorithm=method))
    assert line.startswith(f"--algorithm: the messages that round sends {wanted}")


class Sent(DFedAvgM):
    """A method that may feed errors back, of which nothing is stated."""

    applies: ClassVar[tuple[str, ...]] = ("compressor",)


class Stepping(Sent):
    averaging_step = 0.1


def test_a_method_of_ones_own_is_not_said_to_feed_no_errors_back() -> None:
    coarse = {"compressor": "top_k:share=0.05", "rounds": 1}
    with pytest.warns(UserWarning, match="Sent.* states no `averaging_step`: unless it feeds err"):
        last(small(algorithm=Sent(), **coarse))
    with pytest.warns(UserWarning, match="fedavg feeds no errors back: models may"):
        last(small(algorithm="fedavg", **coarse))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*are biased")
        last(small(algorithm=Stepping(), **coarse))


class Observing(DFedAvgM):
    columns = ("gap",)

    def observe(self, state: State) -> Any:
        return {"gap": 1.0}


class Other(Observing):
    def observe(self, state: State) -> Any:
        return {"other": state.x[:, 0]}


class Hiding(Observing):
    def observe(self, state: State) -> Any:
        return {"gap": state.x[:, 0], "degree": state.x[:, 0]}


class Forgetting(DFedAvgM):
    columns = ("gap",)


class Watching(DFedAvgM):
    columns = ("norm",)

    def observe(self, state: State) -> Any:
        return {"norm": state.x.norm(dim=1), "largest": state.x.amax(1)}


@pytest.mark.usefixtures("without_figures")
def test_what_a_method_observes_is_in_the_files(tmp_path: Path) -> None:
    run = small(algorithm=Watching(), out=tmp_path, attack="sign_flip:peers=2")
    row = last(run)
    result = dfl.load(tmp_path)
    models = torch.cat([value.flatten(1) for value in result.state.values()], 1)
    assert result.peers.columns[-2:].tolist() == ["norm", "largest"]
    assert result.peers["norm"].tolist() == pytest.approx(models.norm(dim=1).tolist(), rel=1e-5)
    assert result.peers["largest"].tolist() == models.amax(1).tolist()
    assert row["norm"] == result.peers["norm"][result.peers["is_attacker"] == 0].max()
    assert "largest" not in row
    at_end = result.history[result.history["round"] == run.rounds]
    assert at_end["largest"].tolist() == models.amax(1).tolist()


class Naming(DFedAvgM):
    def __init__(self, name: str) -> None:
        super().__init__()
        object.__setattr__(self, "name", name)

    def observe(self, state: Any) -> Any:
        return {self.name: state.x.norm(dim=1)}


class Requiring(DFedAvgM):
    requires: ClassVar[Any] = ("static",)


class Expecting(DFedAvgM):
    expects: ClassVar[Any] = {"static": "it is slow"}


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Observing(), "what observe returns: gap must be Tensor (6,), not 1.0"),
        (Other(), "what observe returns lacks gap, which columns names"),
        (Hiding(), "what observe returns: degree is a column of dfl: name it otherwise"),
        (Naming("peers_up"), "what observe returns: peers_up is a column of dfl: name it"),
        (Naming("test_loss_mean"), "what observe returns: test_loss_mean is a column of dfl"),
        (Forgetting(), "what observe returns lacks gap, which columns names"),
        (Requiring(), "requires must be a dict of dfl.algorithms.assumptions, not ('static',)"),
        (Expecting(), "expects must be a dict of dfl.algorithms.assumptions, not {'static'"),
    ],
)
def test_what_a_method_states_has_its_form(method: DFedAvgM, wanted: str) -> None:
    line = refused(lambda: small(algorithm=method))
    assert line.startswith(f"--algorithm own:{type(method).__name__}")
    assert wanted in line


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x / x.norm().clip(min=1).item(),
        lambda x: torch.from_numpy(x.numpy().copy()),
        lambda x: x + torch.zeros(len(x), 1),
    ],
)
def test_init_may_read_the_models(read: Any) -> None:
    """The memory of a state is estimated on models without values."""

    def both(x: Tensor) -> Kept:
        return Kept(x, read(x))

    run = small(algorithm=Returning(begun=both, after=both))
    assert info(prepare(run, World())).method.rows == 1
    assert last(run)["train_loss"] == last(small())["train_loss"]


def test_a_class_is_no_method() -> None:
    line = refused(lambda: small(algorithm=DFedAvgM))
    assert line.startswith("--algorithm must be a spec or an object of class Algorithm")


class Late(DFedAvgM):
    """Returns nothing in round 4."""

    def round(self, state: State, task: Any, net: Any) -> Any:
        return super().round(state, task, net) if net.t < 4 else None


@pytest.mark.usefixtures("without_figures")
def test_the_first_round_after_a_resume_is_checked(tmp_path: Path) -> None:
    given = {"algorithm": Late(), "dataset": DATA}
    crash(small(rounds=6, checkpoint_every=2, out=tmp_path, **given), 4)
    line = refused(lambda: dfl.resumed(tmp_path, **given))
    assert "what round returns must be a frozen dataclass" in line
