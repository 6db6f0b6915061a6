"""Sample, warm up, measure, save and load caches, for `nodes/`. May import: everything of the engine."""
