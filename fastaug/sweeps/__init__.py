"""Sweeps: many trainings of a grid, on one machine or on many that share a storage."""
