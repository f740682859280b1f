"""What runs inside a batch job: the driver of its rounds, the trainers, the measurements."""
