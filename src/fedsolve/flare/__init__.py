"""Deployment: the same algorithms over machines, by NVIDIA FLARE.

`protocol` says what crosses the network, `server` and `site` are its two ends, `roster` is the
server's view of its sites, `participation` records which of them took part, `limits` has what a
site's owner lets a server ask, `journal` keeps on disk what neither end may lose. `jobs` runs both
ends as a FLARE job, `supervisor` runs an experiment as a series of jobs, `admin` talks to FLARE's
server, `processes` starts servers and sites, and `provisioning` makes each machine's kit.
"""
