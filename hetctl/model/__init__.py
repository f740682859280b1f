"""The values that every part of hetctl speaks in: standard library only."""
