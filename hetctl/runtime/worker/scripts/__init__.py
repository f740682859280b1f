"""Members that are commands: their scripts' start, environment, reports and training."""
