"""One module per peer, each run in that peer's environment: `python -m benchmarks.peers.workers.NAME`."""
