"""What PyTorch promises nothing about: every private name of it that the engine uses, looked up when it is first used.

Imports nothing of the engine. Doors: `private.NAME`, `private.switch`, `private.unsupported`.
"""
