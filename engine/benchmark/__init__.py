"""What the Benchmark node shows: figures and verdict, the plot, a profiler trace of one step.

May import: the modules of `engine/`. Door: `figures.py`.
"""
