"""Compile blocks that are alike. May import: the floors below. Doors: `binding.Binding`, `registry.code_of`."""
