"""Datasets by name, and ways to divide samples among clients."""
