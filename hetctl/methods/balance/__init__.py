"""Batch sizes matched to the speeds of the workers (LB-BSP): managers, predictors and simulation."""
