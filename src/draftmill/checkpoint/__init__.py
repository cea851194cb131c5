"""Checkpoints, resuming, and the layouts in which other programs keep a drafter."""
