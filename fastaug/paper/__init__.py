"""The paper's experiments: what was run, what is chosen from it, and how it is shown."""
