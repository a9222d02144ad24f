"""Export of trained networks to files for other programs."""
