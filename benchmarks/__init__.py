"""Benchmarks; tables.py makes the tables of README and docs from their results in benchmarks/results/."""
