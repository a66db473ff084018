"""The network of a run: schedule, transport, threat model and traffic, and the simulated clock.

A `Net` of `dfl.comm.exchange` is the network in one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dfl.comm.lossy_plan import lossy_edge_plan, lossy_peer_plan
from dfl.comm.plan import Arcs, EdgePlan, PeerPlan
from dfl.comm.schedule import MixingMatrices, Schedule
from dfl.comm.threat_model import ThreatModel
from dfl.comm.traffic import Traffic
from dfl.comm.transport import Transport
from dfl.compression import fitted
from dfl.core.layout import Layout
from dfl.environment.clock import Clock
from dfl.environment.fault_effects import FaultEffects
from dfl.environment.faults import RoundKey

if TYPE_CHECKING:
    from dfl.comm.mpi import World


class Network:
    """What connects the peers of a run.

    Attributes:
        layout: which peers are on which rank.
        schedule: the senders and receivers of every round.
        transport: moves rows between ranks.
        threat_model: what happens to messages on their way.
        traffic: counts what was sent.
        seed: the run's seed.
        shapes: of the parameters of a model in their order; the first of them are in the messages.
        clock: the simulated clock; None where the run has none.
        checked: the slots of messages whose form has been checked.
    """

    def __init__(
        self,
        layout: Layout,
        matrices: MixingMatrices,
        world: World,
        threat_model: ThreatModel,
        seed: int,
        shapes: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.layout = layout
        self.schedule = Schedule(matrices, layout, world.rank)
        self.traffic = Traffic.of(layout.counts[world.rank])
        self.transport = Transport(world)
        compressor = fitted(threat_model.compressor, shapes)
        self.threat_model = threat_model._replace(compressor=compressor)
        self.seed = seed
        self.shapes = tuple(shapes)
        self.clock: Clock | None = None
        self.checked: set[str] = set()
        self._effects: FaultEffects | None = None  # of the latest round that was asked for

    def fault_effects(self, t: int) -> FaultEffects | None:
        """Return the effects of the faults on round t; None where the run has no faults."""
        if not self.threat_model.faults:
            return None
        if self._effects is None or self._effects.round_key.t != t:
            round_key = RoundKey(self.layout.peers, self.seed, t)
            self._effects = FaultEffects(self.threat_model.faults, round_key)
        return self._effects

    def peer_plan(self, t: int, graph: int | None = None) -> PeerPlan:
        """Return the plan of round t for one message per peer, on its graph or on another."""
        entry = t if graph is None else graph
        plan, effects = self.schedule.peer_plan(entry), self.fault_effects(t)
        if effects is None:
            return plan
        edges = self.schedule.edge_plan(entry)
        return lossy_peer_plan(plan, edges, effects, self.layout.peers)

    def edge_plan(self, t: int, graph: int | None = None) -> EdgePlan:
        """Return the plan of round t for one message per edge, on its graph or on another."""
        plan = self.schedule.edge_plan(t if graph is None else graph)
        effects = self.fault_effects(t)
        return plan if effects is None else lossy_edge_plan(plan, effects)

    def time_exchange(self, t: int, size: int, graph: int | None = None) -> None:
        """Advance the clock by an exchange of round t with messages of `size` bytes."""
        if self.clock is None:
            return
        edges = Arcs.of(self.schedule.matrix(t if graph is None else graph))
        effects = self.fault_effects(t)
        if effects is None:
            self.clock.exchange(edges.sender, edges.receiver, size)
        else:
            up = effects.up
            used = up[edges.sender] & up[edges.receiver]
            self.clock.exchange(edges.sender[used], edges.receiver[used], size, up)

    def end_round(self, t: int) -> None:
        """End round t."""
        if self.clock:
            effects = self.fault_effects(t)
            self.clock.end_round(None if effects is None else effects.up)

    def close(self) -> None:
        """Free what MPI holds, on all ranks at a time."""
        self.transport.close()
