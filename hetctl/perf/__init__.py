"""From what was measured to what is predicted: pure functions of values."""
