"""Turn errors into cures for this machine. May import: `torch_compat`. Doors: `describe`, `machine.preflight_here`."""
