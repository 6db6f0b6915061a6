"""Choose the modules to compile. May import: the modules of `engine/`. Door: `discovery.find_blocks`."""
