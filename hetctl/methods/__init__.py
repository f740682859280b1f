"""Methods beside data-parallel training, each whole in a room of its own, and what compares them."""
