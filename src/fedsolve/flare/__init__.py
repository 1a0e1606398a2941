"""Real federations: the same algorithms over NVIDIA FLARE.

`wire` is what crosses the network, `site` and `server` are its two ends, `link` joins them.
"""
