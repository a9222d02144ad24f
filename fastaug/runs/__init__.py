"""What a run writes and shows: run folder, checkpoints, console."""
