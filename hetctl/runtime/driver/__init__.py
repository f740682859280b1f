"""The driver of a batch job: starts agents, gives out tasks, and follows what becomes of them."""
