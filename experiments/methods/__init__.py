"""Methods of decentralized optimisation, compared."""
