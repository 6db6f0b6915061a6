"""Compile while sampling goes on. May import: `failures`, the modules of `engine/`. Door: `thread.compiler`."""
