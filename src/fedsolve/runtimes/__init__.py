"""Runtimes: the places where clients can be, and how a round is executed there."""
