"""The planners and controls of a real run under a virtual clock."""
