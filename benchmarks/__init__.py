"""The benchmarks: `python -m benchmarks.run` measures, and writes `results/`."""
