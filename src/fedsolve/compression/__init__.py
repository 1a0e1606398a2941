"""Compressors, the packets that they make, and error feedback."""
