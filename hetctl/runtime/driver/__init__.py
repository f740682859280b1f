"""What the driver of a batch job does: starts agents, gives out tasks, and follows what becomes of them."""
