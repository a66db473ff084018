"""How peers exchange messages: the exchange over a graph, a server, and MPI beneath them."""
