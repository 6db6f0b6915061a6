"""Random prompts for the fuzz: the pack's nodes between a tiny model and a sampler, with inputs that nobody should give.

The same seed and number give the same prompt. Sizes that the nodes allow and no CPU samples in an hour (16384x16384) are
left out: who asks for them waits, with our nodes as without.
"""

import random

from .prompts import BENCHMARK_NODE, KIT, MODEL_NODE, WARMUP_NODE, inputs_in_order

SAVE_NODE, LOAD_NODE = KIT + "SaveCache", KIT + "LoadCache"
LONG = 10_000_000
WIDE = "\uff16\uff14"  # 64 in digits that Python reads and our sizes do not
# fmt: off
LINKED = [
    "nothing", "nan", "inf", "minus one", "zero", "huge", "huge number of digits", "fraction", "truth", "word", "long text",
    "bytes", "list", "object", "tensor", "empty latent", "latent of text", "flat latent", "latent of nothing",
    "empty conditioning", "conditioning of text", "conditioning of another width",
]
TEXTS = [
    "", " ", "\n", "\x00", "日本語", "\u202egnp.exe", "\ud83d", "e\u0301" * 40, "%s%n{0}{model}", "<script>alert(1)</script>",
    "../../etc/passwd", "C:\\x", "null", "x" * 300,
]
SPECIAL = {
    "filename": [
        "CON", "nul", "com1.txt", "LPT9", "aux.tckcache", ".", "..", ".hidden", "a/b", "/etc/passwd", "x.tckcache", "name ",
        "a" * 101, "fuzz saved", "CONIN$", "cache", "a:b",
    ],
    "file": ["none", "../x.tckcache", "CON", "x.tckcache", "cache", "/etc/passwd", "fuzz saved.tckcache"],
    "extra_sizes": [
        "99999x99999", "64x64", "64x64,80x64", "64x64\n# note\n\n80x64 batch 2", "0x0", "64x64 batch 0", "64x64 batch 99999",
        "64x64x99999", "-64x64", "64x64\n" * 1000, "64x64," * 101, WIDE + "x" + WIDE, "1e3x1e3", "64x64x5", "9" * 500 + "x64",
        "64", "x", "64x64x1x1", "8x8", "1x1", ",,,", "#", "64X64 BATCH 2", "16384x16384x16384 batch 4096", "64x64; 80x80",
    ],
    "only_blocks": [
        "*", "double_blocks.*", "single_blocks.[01]", "single_blocks.[!0]", "[", "[!", "[z-a]", "**", "?" * 9999, "a*" * 4999,
        "*," * 4999, ",", "double_blocks.0,,", "(?i)x", "\\", "double_blocks.*, nothing.*", "DOUBLE_BLOCKS.*", "blocks.*",
        "[[]", "[a-", "*" * 9999, "".join(f"double_blocks.{n}," for n in range(500)),
    ],
}
JSON = [
    None, True, [], {}, [1, 2, 3], {"__value__": [1]}, {"a": {"b": 1}}, -1, 0, 0.5, float("nan"), float("inf"), -float("inf"),
    "12",
]
NUMBERS = [
    -1, 0, 1, -(10**30), 10**30, 10**4000, 0.5, 1e308, float("nan"), float("inf"), "64", WIDE, "64.0", "abc", "0x40", True,
]
# What the base prompts hold, so that a prompt without a mistake runs in a second; and other values that are as good.
GOOD = dict(width=64, height=64, length=1, batch_size=1, cfg=1.0, steps=2, extra_sizes="", filename="fuzz saved")
SMALL = dict(width=[64, 72, 80], height=[64, 80], length=[1], batch_size=[1, 2], cfg=[0.0, 1.0, 2.0], steps=[1, 2])
# fmt: on
# Each of the quick ones takes a second at most; inductor's and those of max-autotune compile.
QUICK = {"backend": ["eager", "aot_eager", "none"], "mode": ["auto", "default"]}
CLASSES = [MODEL_NODE, WARMUP_NODE, BENCHMARK_NODE, SAVE_NODE, LOAD_NODE]


class Generator:
    """Prompts by number.

    Args:
        info: the server's /object_info.
        seed: of all prompts.
        quick: compile nothing with inductor.
    """

    def __init__(self, info: dict, seed: int, quick: bool = False):
        self.inputs = {name: list(inputs_in_order(info[name])) for name in CLASSES}
        self.seed, self.quick = seed, quick

    def prompt(self, number: int) -> tuple[dict, list[str]]:
        """A prompt, and what is odd about it in words."""
        draw = random.Random(f"{self.seed} {number}")
        nodes, kit = self._base(draw)
        odd = []
        for _ in range(draw.choice([0, 1, 1, 1, 1, 1, 2, 2, 3])):
            odd.append(self._spoil(draw, nodes, draw.choice(kit)))
        if draw.random() < 0.1:
            odd.append(_break(draw, nodes, draw.choice(kit)))
        return nodes, odd

    def normal(self) -> dict:
        """A prompt without a mistake that compiles at once; the same each time but for what is asked of the sampler's cache."""
        nodes = self._around()
        self._put(
            nodes,
            "compile",
            MODEL_NODE,
            ["loader", 0],
            {"compile_when": "before first image", "backend": "eager", "mode": "default"},
        )
        self._put(nodes, "warmup", WARMUP_NODE, ["compile", 0], {})
        nodes["sampler"]["inputs"]["model"] = ["warmup", 0]
        return nodes

    @staticmethod
    def _around(name: str = "flux") -> dict:
        size = {"width": 64, "height": 64, "batch_size": 1}
        prompts = {"name": name, "positive_tokens": 24, "negative_tokens": 24, "seed": 0}
        given = {"positive": ["prompts", 0], "negative": ["prompts", 1], "latent_image": ["latent", 0], "model": ["loader", 0]}
        sampler = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0, **given}
        return {
            "loader": {"class_type": "TestTinyModel", "inputs": {"name": name}},
            "prompts": {"class_type": "TestTinyPrompts", "inputs": prompts},
            "latent": {"class_type": "EmptySD3LatentImage", "inputs": size},
            "sampler": {"class_type": "KSampler", "inputs": sampler},
            "save": {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": "fuzz"}},
        }

    def _put(self, nodes: dict, node_id: str, class_type: str, model: list, values: dict) -> None:
        inputs = {}
        for name, kind, options in self.inputs[class_type]:
            if kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
                inputs[name] = values.get(name, GOOD.get(name, options.get("default")))
            elif kind == "CONDITIONING":
                inputs[name] = ["prompts", 1 if name == "negative" else 0]
        nodes[node_id] = {"class_type": class_type, "inputs": {**inputs, "model": model}}

    def _base(self, draw: random.Random) -> tuple[dict, list[str]]:
        """A chain of our nodes, mostly in their usual order, and their ids."""
        nodes = self._around()
        nodes["sampler"]["inputs"]["seed"] = draw.randrange(10**6)
        usual = [LOAD_NODE] * draw.choice([0, 0, 1]) + [MODEL_NODE] + [WARMUP_NODE] * draw.choice([0, 1, 1])
        chain = usual + draw.choice([[], [], [BENCHMARK_NODE], [SAVE_NODE]])
        if draw.random() < 0.25:
            chain = [draw.choice(CLASSES) for _ in range(draw.choice([1, 2, 3, 4]))]
        model, kit = ["loader", 0], []
        for at, class_type in enumerate(chain):
            node_id = f"kit{at}"
            self._put(nodes, node_id, class_type, model, {"backend": "eager"} if self.quick else {})
            kit.append(node_id)
            if class_type != BENCHMARK_NODE:
                model = [node_id, 0]
        nodes["sampler"]["inputs"]["model"] = model
        return nodes, kit

    def _spoil(self, draw: random.Random, nodes: dict, node_id: str) -> str:
        """Another value for one input."""
        name, kind, options = draw.choice(self.inputs[nodes[node_id]["class_type"]])
        inputs = nodes[node_id]["inputs"]
        way = draw.choice(["valid", "odd", "odd", "odd", "odd", "json", "long", "link", "value", "value", "missing"])
        if way == "missing":
            inputs.pop(name, None)
            return f"{name}: missing"
        if way == "link":
            links = [["loader", 0], ["nowhere", 0], [node_id, 0], ["loader", 7], ["loader", -1], ["loader", "0"], ["loader"]]
            links += [["loader", 0, 0], [0, 0], [None, None], ["prompts", 0], ["latent", 0], ["save", 0], ["sampler", 0]]
            inputs[name] = draw.choice(links)
        elif way == "value":
            chosen = draw.choice(LINKED)
            nodes[f"value of {name}"] = {"class_type": "TestValue", "inputs": {"value": chosen}}
            inputs[name] = [f"value of {name}", 0]
            return f"{name}: linked {chosen}"
        elif way == "long":
            text = draw.choice(["x", "9", "64x64\n", "*,", "é"])
            inputs[name] = text * (LONG // len(text))
        elif way == "json":
            inputs[name] = draw.choice(JSON)
        else:
            inputs[name] = self._value(draw, name, kind, options, odd=way == "odd")
        return f"{name}: {shortened(inputs[name])}"

    def _value(self, draw: random.Random, name: str, kind: str, options: dict, odd: bool):
        if name in SPECIAL and (not odd or draw.random() < 0.8):
            return draw.choice(SPECIAL[name])
        if kind == "COMBO":
            good = [value for value in options["options"] if value in QUICK.get(name, [value]) or not self.quick]
            return draw.choice(good if draw.random() < 0.7 or not odd else [good[0].upper(), good[0] + " ", *TEXTS])
        if kind == "BOOLEAN":
            return draw.choice(["false", 2, "", [], True, False] if odd else [True, False])
        if kind in ("INT", "FLOAT"):
            return draw.choice(NUMBERS if odd else SMALL.get(name, [0, 1, 2, 4]))
        return draw.choice(TEXTS if odd else ["", "text"])


def _break(draw: random.Random, nodes: dict, node_id: str) -> str:
    """Something that no page sends: a prompt of another shape.

    A node without inputs ends the host's worker, with our nodes as without, so such a prompt also has a node that nobody knows:
    the host refuses it as a whole, after our handler of prompts has seen it.
    """
    node = nodes[node_id]
    way = draw.choice(
        ["no class", "odd class", "no inputs", "inputs a list", "no node", "a text", "more", "another class", "alone"]
    )
    if way == "no class":
        del node["class_type"]
    elif way == "odd class":
        node["class_type"] = draw.choice([None, "", "TorchCompileKitNothing", 5, ["a"], "x" * LONG])
    elif way in ("no inputs", "inputs a list"):
        node["inputs"] = draw.choice([[], None, "abc", 5])
        if way == "no inputs":
            del node["inputs"]
        nodes["nobody's"] = {"class_type": "NobodyKnowsThis", "inputs": {}}
    elif way == "no node":
        del nodes[node_id]
    elif way == "a text":
        nodes[node_id] = draw.choice(["abc", None, [], 5])
    elif way == "more":
        node["inputs"] |= {"nothing like this": 1, "": 2, "self": 3, "cls": 4}
    elif way == "another class":
        node["class_type"] = draw.choice(CLASSES)
    elif way == "alone":
        for other in [key for key in nodes if key != node_id]:
            del nodes[other]
    return f"node {node_id}: {way}"


def shortened(value: object) -> str:
    """A value in words of a results file."""
    if isinstance(value, str) and len(value) > 60:
        return f"{value[:20]!r}... of {len(value):,} characters"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of very many digits"
    return repr(value)
