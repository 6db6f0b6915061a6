"""Attach to and run the host's models. May import: `host/graphs`, `host/weights`, `messages` and what is below them."""
