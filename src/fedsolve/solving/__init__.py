"""Runs: the loop over rounds, options, sweeps, stopping rules, checkpoints, results."""
