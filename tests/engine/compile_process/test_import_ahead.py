"""What a trace needs is imported before it, beside the loading of weights."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TRACE = """
import gc, json, sys
import torch
from engine.compile_process.obtain import import_ahead
from engine.torch_compat import private

last = private.IMPORTED_BY_TRACES[-1]
collected = []
gc.callbacks.append(lambda phase, info: collected.append(last in sys.modules) if info["generation"] == 2 else None)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)
    def forward(self, x):
        heads = self.linear(self.norm(x)).view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)
        return x + torch.nn.functional.scaled_dot_product_attention(*[heads] * 3).transpose(1, 2).reshape(x.shape)

import_ahead().join()
block, before, collected = Block(), set(sys.modules), list(collected)
for batch in 1, 2:
    torch.compile(block, backend="eager", dynamic=True)(torch.randn(batch, 7, 64))
print(json.dumps([sorted(set(sys.modules) - before), collected]))
"""


def test_a_trace_neither_imports_much_nor_looks_at_what_was_imported():
    done = subprocess.run([sys.executable, "-c", TRACE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names, collected = json.loads(done.stdout.splitlines()[-1])
    assert not [name for name in names if name.startswith(("sympy", "torch.distributed", "torch.export"))]
    assert collected[-1]  # after the last import: else the garbage collector looks at all objects in the call that traces
