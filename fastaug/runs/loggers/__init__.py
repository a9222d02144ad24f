"""Loggers: TensorBoard, Weights & Biases, MLflow, Trackio, and one's own."""
