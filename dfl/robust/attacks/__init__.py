"""Attacks on messages and on training data, `ATTACKS`.

An attack chooses its peers by number, or as a share of all, drawn by address. An attack on messages
is given a view of what all senders are about to send, in this rank's coordinates, whether it uses
it or not. Its formulas are applied to updates: those that a server receives, and those of models
that a method sends together with where they started (`start` of `Net.exchange`). Other messages,
such as differences to public copies, are falsified as they are.

Where all senders are attackers, attacks that imitate honest senders imitate what the attackers
would have sent. Every coordinate of a falsified message is a function of its block of coordinates
and of sums over all blocks, so it is the same for every layout.
"""

from dfl.robust.attacks import blind, omniscient, optimized
from dfl.robust.attacks.base import ATTACKS, Attack, AttackView, Honest

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackView",
    "Honest",
    "blind",
    "omniscient",
    "optimized",
]
