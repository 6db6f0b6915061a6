"""Put the weights of a block in place before its code runs. May import: `host/`, `compile` and what is below it."""
