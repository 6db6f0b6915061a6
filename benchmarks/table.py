"""Compare eager, ComfyUI's node, KJNodes and this pack on what people run: whole prompts and steps on a real ComfyUI server.

    python -m benchmarks.table --host COMFYUI --kjnodes KJNODES --gguf COMFYUI-GGUF --out FILE [--setups flux flux-int8]
    python -m benchmarks.table --host COMFYUI --tiny --out FILE      # small models on the CPU

1. A set-up is a model in a format, perhaps with an option of the server or a node (SETUPS, the most asked for first).
2. Each variant of a set-up has a server of its own with empty caches and no other pack. Servers take turns as in sessions.py:
   one turn for all first prompts, then one turn for each of the last.
3. The first prompts come as a user queues them. Our pack compiles meanwhile; then the benchmark waits until all is compiled.
4. The last prompts show the time from then on: `seconds` and `step` are their medians.
5. The last prompt has the same seed everywhere; `error` is the distance of its latent from eager's, `noise` the distance from
   eager of eager with another of PyTorch's attention kernels.
A row holds one variant and is written after each of its turns. Rows that --out has already are not measured again.
"""

import functools
import math
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from devtools.prompts import MODEL_NODE
from devtools.server import Server, ServerError

from .sessions import COMPILERS, GGUF_PACK, KEPT, Bench, Graph, OutOfTimeError, arguments, at_work, parse, settings_for

VARIANTS = ("eager", "core", "kjnodes", "kjnodes_static", "ours", "ours_static")
OPTIONS = {
    "": [],
    "sage": ["--use-sage-attention"],
    "flash": ["--use-flash-attention"],
    "fast": ["--fast", "fp16_accumulation"],
    "easycache": [],
}
STEPS = {"flux": 20, "sdxl": 25, "sd15": 20, "z_image": 9, "klein": 4, "wan22": 8, "qwen_edit": 8}
TINY_STEPS = 4
# Attention kernels of PyTorch, by --tiny: the first with which eager's latent differs gives the noise.
KERNELS = {False: ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION"), True: ("MATH",)}
# Suffix of a pair's second model, whose file is a symlink to the first model's.
LOW_NOISE = "_low"
# First prompts, in which our pack compiles; how many more follow at most if the pack puts compiling off; steps in which CUDA
# graphs may still be captured; last prompts, which are measured.
FIRST, MOST_PUT_OFF, CAPTURING_STEPS, SETTLED = 4, 12, 16, 3
TINY_FIRST, TINY_SETTLED = 2, 1
LAST_SEED = 99
POLL, MEMORY_POLL = 1.0, 0.2
GIB = 1024**3


@dataclass(frozen=True)
class Setup:
    """What a person runs.

    Args:
        model: in models.py; wan22 is two models, of which the second finishes the sampling.
        weights: one of `checkpoints.FORMATS`, or a weight_dtype of ComfyUI's loader.
        option: one of OPTIONS.
    """

    model: str
    weights: str = "default"
    option: str = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.model, self.weights.replace("default", ""), self.option) if part)

    def file_format(self) -> str:
        return "default" if self.weights.startswith("fp8") else self.weights


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("flux"),
        Setup("flux", "int8"),
        Setup("flux", "scaled"),
        Setup("flux", "fp8_e4m3fn_fast"),
        Setup("flux", "gguf"),
        Setup("z_image"),
        Setup("z_image", "int8"),
        Setup("klein"),
        Setup("qwen_edit"),
        Setup("wan22"),
        Setup("sdxl"),
        Setup("sd15"),
        *(Setup(model, option=option) for option in ("sage", "flash", "fast", "easycache") for model in ("flux", "sdxl")),
    )
}


def load(graph: Graph, node: str, setup: Setup, model: str, kernel: str | None, end: str = "") -> list:
    """Add the nodes from the loader up to the compiling node; `end` follows the model's name in the names of its files."""
    patcher = graph.load(node, model, setup.weights, end)
    if setup.model == "wan22":
        lora = {"lora_name": f"{model}{end}.safetensors", "strength_model": 1.0}
        patcher = graph.add(f"{node} lora", "LoraLoaderModelOnly", model=patcher, **lora)
        patcher = graph.add(f"{node} shift", "ModelSamplingSD3", model=patcher, shift=5.0)
    if setup.option == "easycache":
        patcher = graph.add(f"{node} cache", "EasyCache", model=patcher)
    if kernel is not None:
        patcher = graph.add(f"{node} attention", "SessionAttention", model=patcher, kernel=kernel)
    return patcher


def prompt_of(
    info: dict, setup: Setup, model: str, variant: str, steps: int, seed: int, settings: dict, kernel: str | None
) -> dict:
    """The prompt from the loader to the saved image, as the server takes it; `info` is the server's /object_info."""
    from . import models

    graph, about = Graph(info), models.MODELS[model]
    positive = graph.add("prompts", "SessionPrompts", name=model, tokens=about.text[1], negative_tokens=about.text[1])
    latent = graph.latent(model, *about.size[:2])
    if setup.model == "qwen_edit":
        for name in ("reference", "other reference"):
            positive = graph.add(name, "ReferenceLatent", conditioning=positive, latent=latent)
    common = {"steps": steps, "cfg": about.cfg, "sampler_name": "euler", "scheduler": "simple"}
    common |= {"positive": positive, "negative": ["prompts", 1]}
    patcher = graph.compile("compile", load(graph, "model", setup, model, kernel), variant, settings)
    if setup.model == "wan22":
        low = graph.compile("low compile", load(graph, "low", setup, model, kernel, LOW_NOISE), variant, settings)
        first = {"add_noise": "enable", "end_at_step": steps // 2, "return_with_leftover_noise": "enable"}
        last = {"add_noise": "disable", "start_at_step": steps // 2, "return_with_leftover_noise": "disable"}
        for name, of_model, part in (("high sampler", patcher, first), ("low sampler", low, last)):
            inputs = {**common, **part, "noise_seed": seed, "model": of_model, "latent_image": latent}
            latent = graph.add(name, "KSamplerAdvanced", **inputs)
    else:
        latent = graph.add("sampler", "KSampler", model=patcher, latent_image=latent, seed=seed, denoise=1.0, **common)
    graph.save(model, latent)
    return graph.nodes


class CodeWatch(threading.Thread):
    """Poll once a second whether the pack still compiles."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self._server, self._over = server, threading.Event()
        self.began = self.last_busy = time.monotonic()
        self.busy = True

    def run(self) -> None:
        while not self._over.wait(POLL):
            with suppress(OSError):
                self.look()

    def look(self) -> dict:
        report = self._server.get("/torch-compile-kit/report")
        self.busy = any(model["being_compiled"] for model in report["models"])
        if self.busy:
            self.last_busy = time.monotonic()
        return report

    def wait(self, seconds: float) -> float | None:
        """Wait until the pack compiles nothing; returns seconds from `began` to then, None if not reached after `seconds`."""
        end = time.monotonic() + seconds
        self.look()
        while self.busy and time.monotonic() < end:
            time.sleep(POLL / 2)
            self.look()
        return None if self.busy else round(self.last_busy - self.began, 1)

    def stop(self) -> None:
        self._over.set()
        self.join(5)


@dataclass
class Contender:
    """A variant of a set-up.

    Args:
        held: bytes of the GPU that the server holds between turns.
    """

    setup: Setup
    model: str
    variant: str
    server: Server
    row: dict
    held: int = 0

    @property
    def has_our_pack(self) -> bool:
        return COMPILERS.get(self.variant, MODEL_NODE) == MODEL_NODE

    @contextmanager
    def turn(self):
        """Let the server work, and note its peak of GPU memory in the row. All other servers are stopped, so that the memory
        they hold does not change."""
        with at_work(self.server), _highest_use() as uses:
            yield
        others = uses[0] - self.held
        self.held = uses[-1] - others
        self.row["vram_gib"] = max(self.row.get("vram_gib", 0), round((max(uses) - others) / GIB, 2))


@contextmanager
def _highest_use():
    """Sample the bytes of the GPU in use by all processes into a list; its first entry is from before, its last from after."""
    uses, over = [_used()], threading.Event()

    def look() -> None:
        while not over.wait(MEMORY_POLL):
            uses.append(_used())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield uses
    finally:
        over.set()
        thread.join()
        uses.append(_used())


def _used() -> int:
    if not Path("/dev/nvidiactl").exists():
        return 0
    import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(int(visible))).used


class Table(Bench):
    """Measure set-ups. The folder `latents` holds eager's last latent of each set-up."""

    def __init__(self, options, module: str = "table"):
        super().__init__(options, module)
        self.latents = self.base / "latents"
        self.latents.mkdir(exist_ok=True)

    def make_files_of(self, setups: list[Setup], model: str) -> None:
        """Write a model's files in all formats that the set-ups need."""
        self.make_files(model, sorted({setup.file_format() for setup in setups}))
        if setups[0].model == "wan22":
            for file in (self.base / "models").glob(f"*/{model}.safetensors"):
                low = file.with_name(f"{model}{LOW_NOISE}.safetensors")
                low.unlink(missing_ok=True)
                low.symlink_to(file.name)

    def measured(self, setup: Setup, variant: str) -> bool:
        key = {"setup": setup.name, "variant": variant}.items()
        return any(key <= row.items() and ("seconds" in row or "died" in row) for row in self.known["rows"])

    def measure(self, setup: Setup, model: str, variants: list[str]) -> None:
        """Add a row for each variant, also for one that ends with an error."""
        about = {"kind": "table", "setup": setup.name, "model": model, "weights": setup.weights, "option": setup.option}
        packs = [GGUF_PACK] if setup.weights == "gguf" else []
        self.take_turns(about, setup, variants, SETTLED, arguments=OPTIONS[setup.option], packs=packs)

    def take_turns(self, about: dict, setup: Setup, variants: list[str], settled: int, **server) -> None:
        """Run the prompts of the variants.

        Args:
            about: the first keys of each row.
            settled: how many last prompts are measured.
            server: further arguments of `Bench.server`.
        """
        self.left()
        self.clear(*KEPT)
        with ExitStack() as stack:

            def enter(variant: str) -> Server:
                return stack.enter_context(self.paused(variant, **server))

            with ThreadPoolExecutor() as together:
                servers = list(together.map(enter, variants))
            held = _used() // len(servers)  # idle servers hold the same
            contenders = []
            for variant, server in zip(variants, servers, strict=True):
                row = {**about, "variant": variant, "prompts": [], "server_start": round(server.seconds_to_start, 1)}
                contenders.append(Contender(setup, about["model"], variant, server, row, held))
            self.known["rows"] += [contender.row for contender in contenders]
            settled = TINY_SETTLED if self.options.tiny else settled
            before_last = [functools.partial(self._run, name="settled", seed=2000 + n) for n in range(1, settled)]
            for part in (self._first, *before_last, self._last):
                for contender in contenders:
                    self._turn(contender, part)
        for contender in contenders:
            print(_line(contender.row), flush=True)

    def _turn(self, contender: Contender, part: Callable[[Contender], object]) -> None:
        if "died" in contender.row:
            return
        try:
            with contender.turn():
                part(contender)
        except OutOfTimeError:
            raise
        except Exception as error:  # the other rows are still to be measured
            self.left()  # raises if time is up: then the variant has not died
            if not isinstance(error, ServerError):
                traceback.print_exc()
            contender.row["died"] = f"{type(error).__name__}: {str(error)[-300:]}"
        self.save()

    def _run(self, of: Contender, name: str, seed: int, kernel: str | None = None) -> bool:
        """Run one prompt and add it to the row; returns whether it succeeded."""
        taken = self.run(of.server, self.nodes_of(of, of.server.get("/object_info"), seed, kernel))
        of.row["prompts"].append({"prompt": name, **taken})
        if "died" in taken and kernel is None:
            of.row["died"] = taken["died"]
        return "died" not in taken

    def nodes_of(self, of: Contender, info: dict, seed: int, kernel: str | None) -> dict:
        return prompt_of(info, of.setup, of.model, of.variant, self.steps(of), seed, self.options.settings, kernel)

    def steps(self, of: Contender) -> int:
        return TINY_STEPS if self.options.tiny else STEPS[of.setup.model]

    def _first(self, of: Contender) -> None:
        """Run the first prompts, until all code is compiled."""
        if not of.has_our_pack:
            self._run(of, "first", 1000)
            return
        of.row["settings"] = settings_for(of.server.get("/object_info"), self.options.settings)
        watch = CodeWatch(of.server)
        watch.start()
        names = ["first", *(f"next {n}" for n in range(1, TINY_FIRST if self.options.tiny else FIRST))]
        runs = all(self._run(of, name, 1000 + n) for n, name in enumerate(names))
        for n in range(MOST_PUT_OFF):
            if not runs or not 0 < _put_off(of.row["prompts"][-1]) <= MOST_PUT_OFF:
                break
            runs = self._run(of, f"put off {n}", 1100 + n)
        if runs:
            of.row["ready"] = watch.wait(min(self.options.ready_limit, self.left()))
            capturing = 0 if self.options.tiny else math.ceil(CAPTURING_STEPS / STEPS[of.setup.model])
            for n in range(capturing):
                self._run(of, "capturing", 1900 + n)
        watch.stop()

    def _last(self, of: Contender) -> None:
        """Run the last of the settled prompts, and put their figures into the row."""
        if self._run(of, "settled", LAST_SEED):
            self._sum_up(of)
            self._compare(of)
            if of.variant == "eager" and not of.setup.option:
                self._noise(of)

    def _sum_up(self, of: Contender) -> None:
        row = of.row
        settled = [prompt for prompt in row["prompts"] if prompt["prompt"] == "settled"]
        row["seconds"] = round(statistics.median(prompt["seconds"] for prompt in settled), 3)
        usual = statistics.fmean if of.setup.option == "easycache" else statistics.median  # EasyCache skips some of the steps
        row["step"] = round(usual(step_seconds(settled)), 5)
        row |= {key: settled[-1][key] for key in ("graphs", "breaks") if key in settled[-1]}
        if of.has_our_pack:
            report = of.server.get("/torch-compile-kit/report")["models"]
            row["compile_seconds"] = round(sum(model["compile_seconds"] for model in report), 1)
            row["compiled_in_call"] = [sentence for model in report for sentence in model["compiled_in_call"]]
            row["failures"] = [failure["message"] for model in report for failure in model["failures"]]
            row["says"] = settled[-1].get("lines", {})  # shows if code of this benchmark keeps CUDA graphs off
            row["cuda_graphs"] = of.server.get("/session/graphs")["captures"]

    def _compare(self, of: Contender) -> None:
        """Keep eager's last latent; for another variant, measure the distance of its latent from that."""
        if of.variant == "eager":
            of.server.post("/session/latent", {"file": self._latent_file(of)})
        elif Path(self._latent_file(of)).exists():
            of.row["error"] = self._error(of)

    def _noise(self, of: Contender) -> None:
        of.row["noise"] = {}
        for kernel in KERNELS[self.options.tiny]:
            if self._run(of, f"with {kernel}", LAST_SEED, kernel):
                of.row["noise"][kernel] = self._error(of)
                if of.row["noise"][kernel]:
                    break

    def _latent_file(self, of: Contender) -> str:
        return str(self.latents / f"{of.setup.name}.pt")

    def _error(self, of: Contender) -> float:
        error = of.server.post("/session/latent", {"file": self._latent_file(of), "compare": True})["error"]
        return float(f"{error:.4g}")


def _put_off(prompt: dict) -> int:
    """After how many more runs the pack begins to compile, as its status lines said after `prompt`; 0: it has begun."""
    words = [word for _state, *says in prompt.get("lines", {}).values() for word in says]
    return max((word[1] for word in words if word and word[0] == "putOff"), default=0)


def step_seconds(prompts: list[dict]) -> list[float]:
    """Seconds of the prompts' steps without each sampling's first step, which includes loading, or its only one (a decode)."""
    samplings = [steps for prompt in prompts for steps in (*prompt.get("warmup_steps", []), prompt["steps"])]
    return [seconds for steps in samplings for seconds in steps[1:] or steps]


def _line(row: dict) -> str:
    where = f"{row['setup']} {row['variant']}"
    if "died" in row or "seconds" not in row:
        return f"{where}: {row.get('died', 'not finished')}"
    keys = ("ready", "graphs", "breaks", "cuda_graphs", "says", "error", "noise", "vram_gib", "server_start")
    keys += ("compiled_in_call",)
    about = ", ".join(f"{key} {row[key]}" for key in keys if key in row)
    prompts = " ".join(f"{prompt['seconds']:.1f}" for prompt in row["prompts"] if "seconds" in prompt)
    return f"{where}: {row['seconds']:.2f} s, step {row['step']:.4f}; prompts {prompts}; {about}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--setups", nargs="+", choices=list(SETUPS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--ready-limit", type=float, default=90, help="seconds for which code is waited for")
    options = parse(parser)
    setups = [SETUPS[name] for name in options.setups or SETUPS]
    setups = [setup for setup in setups if options.gguf or setup.weights != "gguf"]
    variants = [variant for variant in options.variants if options.kjnodes or not variant.startswith("kjnodes")]
    if options.tiny:  # no Sage on a CPU; small models that the host's loader does not know have no files
        with_files = ("flux", "klein", "wan22", "qwen_edit")
        setups = [s for s in setups if s.option not in ("sage", "flash") and (s.weights == "default" or s.model in with_files)]
    table = Table(options)
    try:
        for model in dict.fromkeys(setup.model for setup in setups):
            of_model = [setup for setup in setups if setup.model == model]
            jobs = [(setup, [v for v in variants if not table.measured(setup, v)]) for setup in of_model]
            jobs = [(setup, lacking) for setup, lacking in jobs if lacking]
            if not jobs:
                continue
            name = f"{model}_small" if options.tiny else model
            table.make_files_of([setup for setup, _ in jobs], name)
            for setup, lacking in jobs:
                table.measure(setup, name, lacking)
            table.delete_files(name)
    except OutOfTimeError:
        print(f"stopped by --limit {options.limit:g}; what there is is in {options.out}", flush=True)


if __name__ == "__main__":
    main()
