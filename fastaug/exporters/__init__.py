"""Trained networks as files for other programs."""
