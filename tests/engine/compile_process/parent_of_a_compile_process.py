"""A process that has a compile process lower a graph, and is killed meanwhile; see `test_client.py`."""

import sys
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from misbehaving import Told
from traced_graphs import loaded, request

process = loaded("compile_process.client").compile_process
process.modules = lambda: ["misbehaving"]
process.start()
made = request(loaded, Told().requires_grad_(False), __import__("torch").randn(2, 8))
threading.Thread(target=process.lower, args=(made.text,), daemon=True).start()
print(process.pid, flush=True)
threading.Event().wait()
