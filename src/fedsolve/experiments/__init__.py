"""Experiments: TOML configurations, the registry of names, run folders, reports, trackers."""
