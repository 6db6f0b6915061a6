"""Work out what the Benchmark node shows. May import: `messages`, and the modules of `engine/`.

Doors: `figures.py`, `step_profile.py`.
"""
