"""Work out and draw what the Benchmark node shows. May import: the modules of `engine/`. Door: `figures.py`."""
