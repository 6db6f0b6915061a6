"""Compile the blocks of diffusion models with torch.compile; `host/` alone imports ComfyUI.

A model call, from the node's wrapper to the kernel:

1. `BlockCompiler.__call__` (host/model/wrapper.py), an APPLY_MODEL wrapper, has network_calls.py choose how the call runs. If
   `graphed` (host/graphs/replay.py) knows the call, it replays a CUDA graph, and no later step runs.
2. `Binding.bound` (compile/binding.py) gives each block a `forward` of ours until the call ends.
3. `_run_block`, the forward of step 2, asks `ModelCode.group_of` (compile/registry.py) for the block's group, which checks
   whether the block has changed (blocks/state.py). `_run_block` then puts weights in place (host/weights/) and calls the group.
4. `BlockGroup` (compile/group.py) calls the functions that other packs have put around the forward of the block's class. Inside
   these, the group removes from `transformer_options` what the block does not read, wraps patches so that they are called
   outside of graphs (transformer_options/filter.py, outside.py), and normalizes layouts. `why_eager` (compile/eager.py) decides
   whether the block runs eager.
5. `BlockCode.call` (compile/compiled_code.py) calls `torch.compile` of a copy of the block's forward. If no graph fits, Dynamo
   traces one, in a `CompileSession` with settings of its own.
6. `TracedGraph.__call__` (compile/traced_graph.py) runs the graph operator by operator, or waits, until its code is there; then
   it runs the code.
7. `Compiler.submit` (background/thread.py) has the worker thread `obtain` the code (compile_process/obtain.py): from the store
   (cache/code_store.py), else from the compile process. Then `TracedGraph.lower` loads it and its kernels.
8. In the compile process `answer` (compile_process/lowering.py) reads the graph (wire.py), and `inductor`
   (inductor/backend.py) lowers it to the code that step 6 runs.

Modules directly in this folder (settings, errors, values per model, switches of PyTorch) import no room (a subfolder).
devtools/rooms.py lists which room may import which.
"""
