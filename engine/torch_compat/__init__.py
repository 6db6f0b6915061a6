"""Look up private names of PyTorch. Imports nothing of the engine. Doors: `private.NAME`, `.switch`, `.unsupported`."""
