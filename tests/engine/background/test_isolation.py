"""What compiling does to the process, kept from the process."""

import subprocess
import sys

from support import ROOT

# A loader has set another default dtype when the trace that warms Dynamo up begins, and takes it back before it ends.
LOADER = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from engine.background import isolation
from engine.cache import startup

traces, go_on, dispatch = threading.Event(), threading.Event(), FakeTensorMode.dispatch
FakeTensorMode.dispatch = lambda *args, **kwargs: (traces.set(), go_on.wait(60), dispatch(*args, **kwargs))[2]
torch.set_default_dtype(torch.float16)
startup.prepare(isolation.warm_up_dynamo)
assert traces.wait(60)
torch.set_default_dtype(torch.float32)
torch.use_deterministic_algorithms(True)
torch.backends.cuda.matmul.allow_tf32 = True
go_on.set()
startup.wait_until_prepared()
print(torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32)
"""


def test_what_a_loader_switches_while_dynamo_is_warmed_up_stays():
    done = subprocess.run([sys.executable, "-c", LOADER, str(ROOT)], capture_output=True, text=True)
    assert done.stdout.split() == ["torch.float32", "True", "True"], done.stderr
