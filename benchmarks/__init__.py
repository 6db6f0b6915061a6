"""What measures. Results go to benchmarks/results/, and the README's tables are made from those."""
