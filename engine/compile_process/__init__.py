"""Lower graphs in a process of their own. May import: `background`, `cache`, `inductor`, `failures`, the modules of `engine/`.
Doors: `obtain.obtain`, `client.compile_process`."""
