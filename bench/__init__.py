"""Benchmarks: each prints one table and writes JSON into bench/results/."""
