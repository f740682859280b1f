"""Batches that fit the speed of their workers (LB-BSP): one file per algorithm, all of one shape."""
