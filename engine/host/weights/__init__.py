"""Put the weights of a block in place before the block runs. May import: `host/`, `compile` and the floors below."""
