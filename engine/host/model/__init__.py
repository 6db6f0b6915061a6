"""What runs when the host calls the model: the wrapper, its attention kernel, what the call was asked for.

May import: `host/graphs`, `host/weights`, `host/`, `notices` and what is below them. Door: `attach.attach`.
"""
