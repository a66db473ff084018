"""Statistical inference over a network: one parameter in common, nuisance parameters that differ.

Sites, as hospitals, keep their examples. They share β and differ in γ_j and in their data.
"""
