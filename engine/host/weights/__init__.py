"""How the weights of a block get in place before its compiled code runs, and which stay on the device.

May import: `host/`, `compile` and what is below it. Door: `blocks.weights_of`.
"""
