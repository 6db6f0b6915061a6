"""Run what the host calls a model for. May import: `host/graphs`, `host/weights`, `messages` and what is below them."""
