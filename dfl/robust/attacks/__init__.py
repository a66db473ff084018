"""What do lying peers say, and what do they learn from? `ATTACKS`, on messages and on data.

An attack names its peers by number or by a share of all, drawn by address. One that lies in its
messages is shown what everybody is about to say, in this rank's coordinates, whether it makes use
of that or not. Formulas are applied to words as they are said: a server hears updates, neighbours
hear whatever the method says, under dfedavgm whole models.

Where all who speak attack, those that imitate the honest imitate what the attackers would have
said. Every coordinate of a lie is a function of its block of coordinates and of sums over all
blocks, so no launch changes it.
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
