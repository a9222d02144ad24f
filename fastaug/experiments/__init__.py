"""The paper's experiments: grids, sweeps, results, figures, report."""
