"""Training methods other than plain data parallelism, one package each, and the choice among them."""
