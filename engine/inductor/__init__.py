"""Change what inductor lowers, and how. May import: `failures`, the modules of `engine/`. Door: `backend.inductor`."""
