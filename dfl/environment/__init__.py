"""The simulated world: faults, link and peer speeds, and the clock that counts them."""
