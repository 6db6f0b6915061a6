"""Run what the host calls a model for. May import: `host/graphs`, `host/weights`, `notices` and what is below them."""
