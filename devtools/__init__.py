"""Developers' tools, shared by dev.py and the tests. The nodes do not need this package."""
