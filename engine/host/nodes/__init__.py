"""What the nodes do: sample, warm up, measure, save and load caches.

May import: everything of the engine. Doors: the functions that `nodes/` calls.
"""
