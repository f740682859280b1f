"""What the trainers of a flotilla share on one node: files in memory, no server process."""
