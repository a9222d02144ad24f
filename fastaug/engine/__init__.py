"""The training loop: trainer, learner, optimizer, evaluation."""
