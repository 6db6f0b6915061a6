"""Blocks that read their options in all sorts of ways: a file of source, as the code of a pack is.

Each way is a statement of `forward`; KEY stands for the key that it reads. `forward` returns all that was read, so that two
runs can be compared.
"""

import copy
import importlib.util
import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as some

HELPERS = """
def read(options, name="KEY"):
    return options.get(name)

def read_literal(options):
    return options.get("KEY")

class Reader:
    def read(self, options):
        return options.get("KEY")

    def __call__(self, options):
        return options["KEY"] if "KEY" in options else None
"""

# In another module only: no name in the block's own leads to it.
ELSEWHERE = """
def read_elsewhere(options):
    return options.get("KEY")
"""

WAYS = {
    "get": 'out.append(transformer_options.get("KEY"))',
    "subscript": 'out.append(transformer_options["KEY"] if "KEY" in transformer_options else None)',
    "copy": 'options = transformer_options.copy()\nout.append(options.get("KEY"))',
    "merged": 'options = {**transformer_options, "more": 1}\nout.append(options.get("KEY"))',
    "dict": 'options = dict(transformer_options)\nout.append(options.pop("KEY", None))',
    "update": 'options = {}\noptions.update(transformer_options)\nout.append(options.get("KEY"))',
    "loop with a test": 'for k in transformer_options:\n    if k == "KEY":\n        options = {"k": 1}\nout.append(x)',
    "copied in a loop": """
own = {}
for k in transformer_options:
    own[k] = transformer_options[k]
out.append(own.get("KEY"))""",
    "function": "out.append(read_literal(transformer_options))",
    "module attribute": "out.append(helpers.read_elsewhere(transformer_options))",
    "method": "out.append(self.method(transformer_options))",
    "method by name": 'out.append(getattr(self, "method")(transformer_options))',
    "part": "out.append(self.part(x, transformer_options=transformer_options))",
    "parts": "for part in self.parts:\n    out.append(part(x, transformer_options))",
    "functions in a dict": 'out.append(TABLE["a"](transformer_options))',
    "partial": "out.append(PARTIAL(options=transformer_options))",
    "spread": "out.append(spread(**transformer_options))",
    "inner function": 'def inner():\n    return transformer_options.get("KEY")\nout.append(inner())',
    "lambda": 'out.append((lambda o: o.get("KEY"))(transformer_options))',
    "passed on in a dict": 'out.append(takes_arguments({"x": x, "transformer_options": transformer_options}))',
    "given back": 'options = gives_back(transformer_options)\nout.append(options.get("KEY"))',
    "global object": "out.append(READER.read(transformer_options))",
    "called object": "out.append(READER(transformer_options))",
    "kwargs": "out.append(passes_all(x, transformer_options=transformer_options))",
    "nothing": "out.append(x)",
    "key in a variable": "out.append(transformer_options.get(NAME))",
    "key as an argument": 'out.append(read(transformer_options, "KEY"))',
    "all keys": "out.append(sorted(transformer_options))",
    "count": "out.append(len(transformer_options))",
    "items": "out.append([v for k, v in transformer_options.items() if k == NAME])",
    "bound lookup": "look = transformer_options.get\nout.append(look(NAME))",
    "kept on the block": "self.seen = transformer_options\nout.append(self.seen.get(NAME))",
    "in a list": "box = []\nbox.append(transformer_options)\nout.append(box[0].get(NAME))",
    "in a global": 'STORE["extra_options"] = transformer_options\nout.append(STORE["extra_options"].get(NAME))',
    "added to a global": "STORE.update(transformer_options)\nout.append(STORE.get(NAME))",
    "object of the block": "out.append(self.reader.read(transformer_options))",
    "function of the block": "out.append(self.function(transformer_options))",
    "imported inside": "from copy import copy as own\nout.append(own(transformer_options).get(NAME))",
    "text": 'out.append("{}".format(sorted(transformer_options.items(), key=repr)))',
    "evaluated": 'out.append(eval("transformer_options.get(NAME)"))',
    "made on the way": "out.append(maker()(transformer_options))",
    "function as an argument": "out.append(runs(READER.read, transformer_options))",
    "method called get": "out.append(BOX.get(transformer_options))",
}

_FILE = """
import functools
import torch
from torch import nn

helpers = None
NAME = "KEY"
STORE = {}

def takes_arguments(args):
    return args["transformer_options"].get("KEY")

def gives_back(options):
    return options

def spread(KEY=None, **others):
    return KEY

def passes_all(x, **kwargs):
    return takes_arguments(kwargs)

def maker():
    return read

def runs(function, options):
    def inner(function):
        return function(options)
    return inner(function)

class Box:
    def get(self, options):
        return options.get(NAME)

BOX = Box()

class Part(nn.Module):
    def forward(self, x, transformer_options={}):
        return transformer_options.get("USED")

TABLE = {"a": read_literal}
PARTIAL = functools.partial(read_literal)
READER = Reader()

class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.parts = Part(), nn.ModuleList([Part(), Part()])
        self.reader, self.function = Reader(), lambda options: options.get(NAME)

    def method(self, options):
        return options.get("USED")

    def forward(self, x, transformer_options={}):
        out = []
"""


def load(folder, count, ways):
    """A block that reads in these ways: (statement, key)."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for at, (statement, key) in enumerate(ways):
        helpers = _module(folder, f"helpers_{count}_{at}", (HELPERS + ELSEWHERE).replace("KEY", key))
        body = "".join(f"        {line}\n" for line in statement.splitlines())
        used = key if "part" in statement or "method" in statement else "no key"  # all methods of a class are looked at
        source = HELPERS + _FILE.replace("USED", used) + body + "        return out\n"
        module = _module(folder, f"reading_{count}_{at}", source.replace("KEY", key))
        module.helpers = helpers
        found.append(module.Reading())
    return found


def _module(folder, name, source):
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chain(blocks):
    """One module that runs them all with the same options, and has a block in it for which options are left out."""
    from comfy.ldm.modules.attention import BasicTransformerBlock
    from torch import nn

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)
            self.filtered = BasicTransformerBlock(8, 1, 8)

        def forward(self, x, transformer_options={}):  # noqa: B006
            found = []
            for block in self.blocks:
                found.append(block(x, transformer_options=transformer_options))
            return found

    return Chain()


def run(block, options):
    return repr(block(1, transformer_options=copy.deepcopy(dict(options))))


numbers = itertools.count()
KEYS = ["sigmas", "cond_or_uncond", "uuids", "block_index", "total_blocks", "img_slice", "easycache"]
values = some.recursive(
    some.none() | some.booleans() | some.integers(-2, 2) | some.sampled_from([0.0, -0.0, 1.5, "", "a"]),
    lambda inner: some.lists(inner, max_size=2) | some.dictionaries(some.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
option_dicts = some.dictionaries(some.sampled_from([*KEYS, "rope_options", "more"]), values)
ways = some.lists(
    some.tuples(some.sampled_from([*WAYS.values()]), some.sampled_from([*KEYS, "rope_options"])),
    min_size=1,
    max_size=3,
)
many = settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
