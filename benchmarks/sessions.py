"""Measure what a person waits for: whole prompts on a real ComfyUI server, from pressing Run to the saved image.

    python -m benchmarks.sessions --host COMFYUI --kjnodes KJNODES --out FILE
    python -m benchmarks.sessions --host COMFYUI --tiny --out FILE      # small models on the CPU

A session is a list of prompts that go one by one through the queue of a server as users start it, with a page's websocket open;
`seconds` run from sending a prompt to the server's `execution_success`. Cold: the server's user, home and temporary folders are
empty, and so are the caches of this pack, PyTorch and Triton. Python's bytecode is there, as after an installation by pip
(containers without bytecode import several times as long). Warm: the same session again on new servers, with the folders that
the cold session left. Every variant has a server of its own with only its pack. CUDA events time the steps (session_nodes.py).
Rows are written after every prompt.

The variants take turns prompt by prompt, so that other load on the machine affects all variants alike: while one server works,
the others are stopped (SIGSTOP) and keep their memory. With --free, the variants run their sessions one after another.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from dataclasses import dataclass
from pathlib import Path

from devtools.prompts import MODEL_NODE, WARMUP_NODE, widgets
from devtools.server import PACK_NAME, PromptRejectedError, Server, ServerError, error_of

from . import results

with contextlib.suppress(ImportError):  # ComfyUI's environment has psutil; an environment for tables only may not
    import psutil

# Seconds from a server's start to its first prompt, in which a user opens the page.
PAGE_OPENS = 8
REAL = ["flux", "sdxl", "z_image", "wan14", "sd15"]
TINY = ["flux_small", "sdxl_small", "wan_small"]
NODES = Path(__file__).resolve().with_name("session_nodes.py")
# Variables that move caches of compiled code; `parse` unsets these, so that each cache lies in the folders of its server.
ELSEWHERE = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")
KEPT = ("user", "home", "tmp")
# Packages that compiling imports, with their dependencies.
COMPILER_PACKAGES = ("torch", "triton", "sympy", "mpmath", "networkx")
# variant -> the node that compiles; variants of other benchmarks that are not listed run with our pack
COMPILERS = {
    "eager": None,
    "core": "TorchCompileModel",
    "kjnodes": "TorchCompileModelAdvanced",  # KJNodes' newest node for all models; those for one model are deprecated
    "kjnodes_static": "TorchCompileModelAdvanced",  # the same, with --disable-dynamic-vram
    "ours": MODEL_NODE,
    "ours_static": MODEL_NODE,
    "warmup": MODEL_NODE,
}


@dataclass(frozen=True)
class Prompt:
    """One press of Run.

    Args:
        other_size, other_text: use the session's `other_size`, or its `other_tokens`.
        lora: strength of the LoRA; None: without LoRA.
        patched: with the session's patch.
        restart: a new server runs this prompt and those after it.
    """

    name: str
    other_size: bool = False
    other_text: bool = False
    batch: int = 1
    lora: float | None = None
    patched: bool = False
    restart: bool = False


FULL = (
    Prompt("first image"),
    Prompt("next seed"),
    Prompt("LoRA on", lora=0.8),
    Prompt("LoRA stronger", lora=1.0),
    Prompt("LoRA off"),
    Prompt("new size", other_size=True),
    Prompt("new size again", other_size=True),
    Prompt("batch of 2", batch=2),
    Prompt("other prompt length", other_text=True),
    Prompt("back to the first"),
    Prompt("first after a restart", restart=True),
    Prompt("next"),
    Prompt("once more"),
)
VIDEO = (Prompt("first video"), Prompt("next seed"), Prompt("new size", other_size=True), Prompt("next", other_size=True))
SHORT = (Prompt("first image"), Prompt("next seed"), Prompt("next"))
FEW = (*SHORT, Prompt("LoRA on", lora=0.8), Prompt("LoRA off"), Prompt("next"), Prompt("once more"))
PATCHED = (
    *SHORT,
    Prompt("patch on", patched=True),
    *(Prompt("next with the patch", patched=True) for _ in range(4)),
    Prompt("patch off"),
)


@dataclass(frozen=True)
class Session:
    """What one person makes with one model; the first size and prompt length are the model's own (models.py).

    Args:
        model: name in models.py, if it is not the session's name.
        few_steps: all prompts have a LoRA for few steps, and cfg 1.
        patch: (node, inputs) of another pack or of ComfyUI, which patches the model in prompts that are `patched`.
        refined: a second model of the same kind samples each image again, as SDXL's refiner; rows hold the second's steps.
    """

    steps: int
    prompts: tuple[Prompt, ...] = FULL
    other_size: tuple[int, int] = (1152, 896)
    other_tokens: int = 0
    model: str | None = None
    few_steps: bool = False
    patch: tuple[str, dict] | None = None
    refined: bool = False


SESSIONS = {
    "flux": Session(20, other_tokens=256),
    "sdxl": Session(25, other_tokens=154),
    "z_image": Session(9, other_tokens=200),
    "klein": Session(4, other_tokens=600),
    "sdxl_lightning": Session(4, other_tokens=154, model="sdxl", few_steps=True),
    "qwen_image": Session(20, other_size=(1472, 1104), other_tokens=300),
    "wan14": Session(20, VIDEO, other_size=(640, 480)),
    "sd15": Session(20, SHORT),
    "sdxl_image_prompt": Session(25, PATCHED, model="sdxl", patch=("SessionImagePrompt", {})),
    "flux_nag": Session(20, PATCHED, model="flux", patch=("NAGuidance", {})),
    "flux_override": Session(20, PATCHED, model="flux", patch=("SessionAttention", {"kernel": "CUDNN_ATTENTION"})),
    "sdxl_refined": Session(20, FEW, model="sdxl", refined=True),
    "flux_wide": Session(50, other_tokens=256),  # enough steps for compiling to pay off
    "sdxl_wide": Session(60, other_tokens=154),
    "flux_small": Session(4, other_size=(320, 192), other_tokens=96),
    "sdxl_small": Session(4, other_size=(320, 192), other_tokens=154),
    "klein_small": Session(4, other_size=(320, 192), other_tokens=600),
    "sdxl_image_prompt_small": Session(4, PATCHED, model="sdxl_small", patch=("SessionImagePrompt", {})),
    "sdxl_refined_small": Session(4, SHORT, model="sdxl_small", refined=True),
    "sdxl_lightning_small": Session(4, other_size=(320, 192), other_tokens=154, model="sdxl_small", few_steps=True),
    "wan_small": Session(4, VIDEO, other_size=(192, 96)),
}


def settings_for(info: dict, settings: dict, node: str = MODEL_NODE) -> dict:
    """The `settings` that the server's version of the node has as inputs."""
    names = widgets(info[node])
    return {name: value for name, value in settings.items() if name in names}


class Graph:
    """A prompt as the server takes it; `info` is the server's /object_info."""

    def __init__(self, info: dict):
        self.nodes, self.info = {}, info

    def add(self, node: str, class_type: str, **inputs) -> list:
        self.nodes[node] = {"class_type": class_type, "inputs": {**widgets(self.info[class_type]), **inputs}}
        return [node, 0]

    def load(self, node: str, name: str, weights: str = "default", end: str = "") -> list:
        """Add the node that loads a model.

        Args:
            weights: a format of checkpoints.py, or a weight_dtype of ComfyUI's loader.
            end: follows the model's name in the name of its file.
        """
        from . import checkpoints, models

        if models.MODELS[name].family is not None:
            return self.add(node, "SessionModel", name=name)
        dtype = weights if weights.startswith("fp8") else "default"
        file = f"{name}{end}{checkpoints.FORMATS[weights if dtype == 'default' else 'default']}"
        if weights == "gguf":
            return self.add(node, GGUF_LOADER, unet_name=file)
        return self.add(node, "UNETLoader", unet_name=file, weight_dtype=dtype)

    def compile(self, node: str, patcher: list, variant: str, settings: dict) -> list:
        """Add the variant's compiling node after `patcher`, without `settings` that the server's version of our node lacks."""
        if compiler := COMPILERS[variant]:
            own = settings_for(self.info, settings) if compiler == MODEL_NODE else {}
            patcher = self.add(node, compiler, model=patcher, **own)
        return patcher

    def latent(self, name: str, width: int, height: int, batch: int = 1) -> list:
        from . import models

        size = {"width": width, "height": height, "batch_size": batch}
        if name.startswith(("wan", "qwen_edit")):
            return self.add("latent", "EmptyHunyuanLatentVideo", **size, length=models.MODELS[name].size[2])
        return self.add("latent", EMPTY_LATENTS[models.MODELS[name].channels], **size)

    def save(self, name: str, samples: list) -> None:
        """Decode and save."""
        vae = self.add("vae", "VAELoader", vae_name=f"{name}.safetensors")
        images = self.add("decode", "VAEDecode", samples=samples, vae=vae)
        if name.startswith("wan"):
            video = {"fps": 16.0, "lossless": False, "method": "fastest"}
            self.add("save", "SaveAnimatedWEBP", images=images, filename_prefix="session", **video)
        else:
            self.add("save", "SaveImage", images=images, filename_prefix="session")


def graph(name: str, prompt: Prompt, number: int, variant: str, info: dict, settings: dict, weights: str = "default") -> dict:
    """The prompt of a session as the server takes it.

    Args:
        name: of the session.
        number: added to the seed, so that ComfyUI answers no prompt from its cache.
        info: the server's /object_info.
        settings: inputs of Torch Compile.
        weights: as in `Graph.load`.
    """
    from . import models

    session, made = SESSIONS[name], Graph(info)
    name = session.model or name
    model = models.MODELS[name]
    cfg = 1.0 if session.few_steps else model.cfg
    width, height = session.other_size if prompt.other_size else model.size[:2]
    tokens = session.other_tokens if prompt.other_text else model.text[1]
    lora = f"{name}.safetensors"
    patcher = made.load("model", name, weights)
    if session.few_steps:
        patcher = made.add("few steps", "LoraLoaderModelOnly", model=patcher, lora_name=lora, strength_model=1.0)
    if prompt.lora is not None:
        patcher = made.add("lora", "LoraLoaderModelOnly", model=patcher, lora_name=lora, strength_model=prompt.lora)
    if prompt.patched:
        node, inputs = session.patch
        patcher = made.add("patch", node, model=patcher, **inputs)
    positive = made.add("prompts", "SessionPrompts", name=name, tokens=tokens, negative_tokens=model.text[1])
    text = {"positive": positive, "negative": ["prompts", 1]}
    latent = made.latent(name, width, height, prompt.batch)
    patcher = made.compile("compile", patcher, variant, settings)
    if variant == "warmup":
        patcher = made.add("warmup", WARMUP_NODE, model=patcher, latent_image=latent, cfg=cfg, **text)
    sampling = {"seed": 1000 + number, "steps": session.steps, "cfg": cfg, "denoise": 1.0}
    sampling |= {"sampler_name": "euler", "scheduler": "simple"}
    samples = made.add("sampler", "KSampler", model=patcher, latent_image=latent, **text, **sampling)
    if session.refined:
        refiner = made.compile("compile refiner", made.load("refiner", name, weights, REFINER), variant, settings)
        samples = made.add("refine", "KSampler", model=refiner, latent_image=samples, **text, **{**sampling, "denoise": 0.5})
    made.save(name, samples)
    return made.nodes


# Channels of a latent -> the node that makes an empty one.
EMPTY_LATENTS = {4: "EmptyLatentImage", 16: "EmptySD3LatentImage", 128: "EmptyFlux2LatentImage"}
REFINER = "_refiner"  # follows the model's name in the name of the second model's file
GGUF_LOADER, GGUF_PACK = "UnetLoaderGGUF", "gguf-pack"  # of ComfyUI-GGUF: its node, and its link in custom_nodes


class OutOfTimeError(Exception):
    """The clock of --limit ran out."""


def make_bytecode(base: Path, host: str) -> None:
    """Compile the modules that servers import to bytecode in base/bytecode, as pip does when it installs."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(base / "bytecode")
    found = [importlib.util.find_spec(name) for name in COMPILER_PACKAGES]
    folders = [*(Path(spec.origin).parent for spec in found if spec is not None), Path(host), results.ROOT / "engine"]
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", *map(str, folders)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Bench:
    """The folder, the time limit and the rows of one run of a benchmark.

    Args:
        options: of the command line; see `arguments`.
        module: the benchmark's name.
    """

    def __init__(self, options, module: str):
        self.options, self.module = options, module
        self.base = options.folder.resolve()
        self.deadline = time.monotonic() + options.limit
        self.log = options.out.with_suffix(".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.known, self._describing = results.load(options.out), threading.Lock()
        (self.base / "custom_nodes").mkdir(parents=True, exist_ok=True)
        self.link("session_nodes.py", NODES)
        if options.kjnodes:
            self.link("kjnodes", options.kjnodes.resolve())
        if options.gguf:
            self.link(GGUF_PACK, options.gguf.resolve())
        if not options.tiny:  # takes a minute on two cores
            make_bytecode(self.base, options.host)
        (self.base / "page").mkdir(exist_ok=True)
        (self.base / "page" / "index.html").write_text("<title>sessions</title>")

    def link(self, name: str, target: Path) -> None:
        link = self.base / "custom_nodes" / name
        link.unlink(missing_ok=True)
        link.symlink_to(target, target_is_directory=target.is_dir())

    def left(self) -> float:
        """Seconds left until --limit; raises OutOfTimeError if none are."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise OutOfTimeError
        return left

    def save(self) -> None:
        results.save(self.options.out, self.known)

    def folder(self, variant: str) -> Path:
        """The base directory of a variant's servers; all variants share models and packs."""
        folder = self.base / "servers" / variant
        folder.mkdir(parents=True, exist_ok=True)
        for shared in ("models", "custom_nodes"):
            (self.base / shared).mkdir(exist_ok=True)
            if not (folder / shared).is_symlink():
                (folder / shared).symlink_to(self.base / shared, target_is_directory=True)
        return folder

    def clear(self, *folders: str) -> None:
        """Remove these folders of all variants' servers, with their output and temp."""
        for variant in (self.base / "servers").glob("*"):
            for folder in (*folders, "output", "temp"):
                shutil.rmtree(variant / folder, ignore_errors=True)

    @contextlib.contextmanager
    def server(self, variant: str, cores: int = 0, arguments=(), packs=()):
        """A server as users start it, with the variant's pack and session_nodes.py, which times steps.

        Args:
            cores: how many cores the server runs on, from the first on; 0: all.
            arguments, packs: further arguments of main.py, further packs.
        """
        packs = ["session_nodes.py", *packs]
        if variant.endswith("_static"):
            arguments = ["--disable-dynamic-vram", *arguments]
        if variant.startswith("kjnodes"):
            packs.append("kjnodes")
        elif COMPILERS.get(variant, MODEL_NODE) == MODEL_NODE:
            packs.append(PACK_NAME)
        arguments = [
            "--front-end-root",
            str(self.base / "page"),
            "--disable-all-custom-nodes",
            "--whitelist-custom-nodes",
            *packs,
            *arguments,
        ]
        base = self.folder(variant)
        for folder in KEPT:
            (base / folder).mkdir(exist_ok=True)
        own = {"HOME": str(base / "home"), "TMPDIR": str(base / "tmp")}
        launcher = ("taskset", "-c", f"0-{cores - 1}") if cores else ()
        began = time.perf_counter()
        server = Server(self.options.host, base, not self.options.tiny, arguments=arguments, environment=own, launcher=launcher)
        try:
            server.wait_until_ready(min(300, self.left()))
            server.seconds_to_start = time.perf_counter() - began
            with self._describing:
                self._describe(server)
            with server.progress():  # a websocket, as an open page has
                yield server
        finally:
            server.stop()
            with open(self.log, "a", encoding="utf-8") as log:
                log.write(f"\n===== {variant}, {cores or 'all'} cores\n{server.log()}")

    def _describe(self, server) -> None:
        """Add the machine and the versions, as the first server reports both, to the results file."""
        command = results.command(self.module)
        if any(where["command"] == command for where in self.known["environments"][-1:]):
            return
        stats = server.get("/system_stats")
        name, _, allocator = stats["devices"][0]["name"].partition(" : ")  # "cuda:0 NVIDIA H200 : cudaMallocAsync", or "cpu"
        where = {
            "date": datetime.date.today().isoformat(),
            "device": name.partition(" ")[2] or results.cpu_name(),
            "torch": stats["system"]["pytorch_version"],
            "python": stats["system"]["python_version"].split()[0],
            "comfyui": stats["system"]["comfyui_version"],
            "kjnodes": _version_of(self.options.kjnodes),
            "command": command,
        }
        self.known["environments"].append({**where, "allocator": allocator} if allocator else where)

    def make_files(self, model: str, formats=("default",)) -> None:
        """Write a model's files that do not exist yet."""
        command = [sys.executable, "-m", "benchmarks.checkpoints", "--host", self.options.host, "--model", model]
        command += ["--folder", str(self.base / "models"), "--formats", *formats]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.options.tiny else {}
        try:
            subprocess.run(command, cwd=results.ROOT, check=True, timeout=self.left(), env={**os.environ, **hidden})
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None

    def make_refiner(self, model: str) -> None:
        """Make the file of a session's second model: a hard link to the first model's."""
        for file in (self.base / "models" / "diffusion_models").glob(f"{model}.*"):
            file.with_name(f"{model}{REFINER}{file.suffix}").unlink(missing_ok=True)
            os.link(file, file.with_name(f"{model}{REFINER}{file.suffix}"))

    def delete_files(self, model: str) -> None:
        """Remove a model's weights if --delete is given."""
        for file in (self.base / "models" / "diffusion_models").glob(f"{model}[._]*") if self.options.delete else ():
            file.unlink()

    def sessions(self, model: str) -> None:
        """Run a session with each of --cores and each of --caches."""
        file = SESSIONS[model].model or model
        self.make_files(file, [self.options.weights])
        if SESSIONS[model].refined:
            self.make_refiner(file)
        for cores in self.options.cores:
            for cache in self.options.caches:
                self.session(model, cache, cores)
        self.delete_files(file)

    def session(self, model: str, cache: str, cores: int) -> None:
        """Run all prompts of a session, the variants in turn; a variant that ends with an error gets a row, too."""
        self.clear(*(KEPT if cache == "cold" else ()))
        prompts = SESSIONS[model].prompts
        chosen = self.options.prompts or range(1, len(prompts) + 1)
        numbered = [(place, prompts[n - 1]) for place, n in enumerate(chosen, 1)]
        restart = next((at for at, (_, prompt) in enumerate(numbered) if prompt.restart), len(numbered))
        common = {"kind": "session", "model": model, "cache": cache, "cores": cores, "free_gib": self.options.free}
        if self.options.weights != "default":
            common["weights"] = self.options.weights
        packs = [GGUF_PACK] if self.options.weights == "gguf" else []
        living = [v for v in self.options.variants if self.options.kjnodes or not v.startswith("kjnodes")]
        if cache == "warm":  # eager compiles nothing
            living = [variant for variant in living if variant != "eager"]
        # With --free one variant at a time: the first of two servers would fill the free memory.
        for some in [[variant] for variant in living] if self.options.free else [living]:
            for part in filter(None, (numbered[:restart], numbered[restart:])):
                self._turns(some, part, common, packs)

    def _turns(self, living: list[str], numbered: list[tuple[int, Prompt]], common: dict, packs: list[str]) -> None:
        """Run these prompts, the variants in turn; removes from `living` each variant whose server ended or hangs.

        Args:
            common: the first keys of each row.
            packs: further packs, as in `server`.
        """
        with contextlib.ExitStack() as stack:
            self.left()
            with concurrent.futures.ThreadPoolExecutor() as together:
                entered = together.map(
                    lambda variant: stack.enter_context(self.paused(variant, common["cores"], packs=packs)), living
                )
                servers = dict(zip(living, entered, strict=True))
            for paused in servers.values() if self.options.free else ():
                with at_work(paused) as server:
                    print(server.post("/session/free", {"gib": self.options.free}), flush=True)
            for number, prompt in numbered:
                for variant in list(living):
                    about = {**common, "variant": variant, "number": number, "prompt": prompt.name}
                    with at_work(servers[variant]) as server:
                        row = self._prompt(server, about, prompt)
                    self.known["rows"].append(row)
                    self.save()
                    print(_line(row), flush=True)
                    if row.get("over"):
                        living.remove(variant)

    @contextlib.contextmanager
    def paused(self, variant: str, *about, **more):
        """The variant's server, stopped (SIGSTOP) until its turn; further arguments as in `server`."""
        with self.server(variant, *about, **more) as server:
            time.sleep(0 if self.options.tiny else PAGE_OPENS)
            tell(server, "SIGSTOP")
            try:
                yield server
            finally:
                tell(server, "SIGCONT")

    def _prompt(self, server, about: dict, prompt: Prompt) -> dict:
        """Run one prompt; returns its row."""
        info = server.get("/object_info")
        if COMPILERS[about["variant"]] == MODEL_NODE:
            about = {**about, "settings": settings_for(info, self.options.settings)}
        settings, weights = self.options.settings, self.options.weights
        nodes = graph(about["model"], prompt, about["number"], about["variant"], info, settings, weights)
        return {**about, **self.run(server, nodes), "server_start": round(server.seconds_to_start, 1)}

    def run(self, server, nodes: dict) -> dict:
        """Run one prompt; returns its times, or the error as `died`, with `over` if the server ended or hangs."""
        allowed = min(self.options.prompt_limit, self.left())
        try:
            with Beside(server) as beside:
                posted = time.time()
                entry = server.finished(server.start(nodes), allowed)
        except PromptRejectedError as error:
            return {"died": f"refused: {json.dumps(error.node_errors or error.answer)[:300]}"}
        except ServerError as error:
            if server.process.poll() is None:
                self.left()
                return {"died": f"no result after {allowed:.0f} s", "over": True}
            return {"died": f"server ended: {str(error)[-300:]}", "over": True}
        answer = server.get("/session/steps")
        if (error := error_of(entry)) is not None:
            return {"died": f"{error['exception_type']}: {error['exception_message'][:200]}"}
        done = next(data["timestamp"] for kind, data in entry["status"]["messages"] if kind == "execution_success") / 1000
        *before, steps = [[round(seconds, 4) for seconds in steps] for steps in answer.pop("samplings")]
        warmup = {"warmup_steps": before} if before else {}
        seconds = {"seconds": round(done - posted, 3), "longest_step": max(steps), "steps": steps}
        worked = [[round(at - posted, 2), said] for at, said in answer.pop("worked")]
        return {**seconds, **warmup, **answer, "worked": worked, **beside.told(), **lines(server)}


class Beside:
    """Measure, once a second during a prompt, the memory of the server's child processes, and count the processes of all
    servers that hold GPU memory (if the machine's nvidia-smi shows them)."""

    def __init__(self, server):
        self._server, self._over = server, threading.Event()
        self._gib, self._on_gpu = 0.0, set()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._over.set()
        self._thread.join()

    def told(self) -> dict:
        return {"beside_gib": round(self._gib, 3), "gpu_processes": len(self._on_gpu)}

    def _look(self) -> None:
        while not self._over.wait(1):
            with contextlib.suppress(psutil.Error):
                started = psutil.Process(self._server.process.pid).children(recursive=True)
                self._gib = max(self._gib, sum(process.memory_full_info().pss for process in started) / 2**30)
            with contextlib.suppress(OSError):
                command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
                self._on_gpu.update(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())


def lines(server) -> dict:
    """The status lines of our nodes by node id; empty if the server does not have our pack."""
    try:
        told = server.get(f"/torch-compile-kit/status?client_id={server.client_id}")
    except urllib.error.HTTPError:
        return {}
    return {"lines": {node: [line["state"], line["says"]] for node, line in told.items()}}


def tell(server, name: str) -> None:
    """Send a signal to a server's process and its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(server.process.pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(getattr(signal, name))


@contextlib.contextmanager
def at_work(server):
    """Continue a stopped server for its turn; all other servers are stopped."""
    tell(server, "SIGCONT")
    try:
        yield server
    finally:
        tell(server, "SIGSTOP")


def _version_of(folder: Path | None) -> str | None:
    file = folder and folder / "pyproject.toml"
    if not file or not file.exists():
        return None
    return next(line.partition('"')[2].strip('"') for line in file.read_text().splitlines() if line.startswith("version"))


def _line(row: dict) -> str:
    where = " ".join(str(row[key]) for key in ("model", "variant", "cache"))
    where += f" cores {row['cores'] or 'all'} free {row['free_gib'] or 'all'}"
    if "died" in row:
        return f"{where} | {row['number']} {row['prompt']}: {row['died']}"
    first, *others = row["steps"]
    usual = sorted(others)[len(others) // 2]
    return (
        f"{where} | {row['number']} {row['prompt']}: {row['seconds']:.2f} s; steps: first {first:.3f}, "
        f"longest {row['longest_step']:.3f}, median {usual:.4f}; graphs {row.get('graphs', '-')}"
    )


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark with a server has; parsed by `parse`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True, help="the folder of ComfyUI")
    parser.add_argument("--kjnodes", type=Path, help="KJNodes' folder; without it that variant is left out")
    parser.add_argument("--gguf", type=Path, help="ComfyUI-GGUF's folder; without it its weights are left out")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to those that are there; .log is beside it")
    parser.add_argument("--settings", type=json.loads, default={}, help="inputs of Torch Compile, as JSON")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is begun")
    parser.add_argument("--prompt-limit", type=float, default=300, help="seconds after which a prompt counts as dead")
    folder = Path(tempfile.gettempdir()) / "kit-sessions"
    parser.add_argument("--folder", type=Path, default=folder, help="models and servers' files (%(default)s)")
    parser.add_argument("--delete", action="store_true", help="remove a model's weights when it has been measured")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    options.host = str(Path(options.host).resolve())
    for name in ELSEWHERE:
        os.environ.pop(name, None)
    return options


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SESSIONS))
    parser.add_argument("--variants", nargs="+", choices=list(COMPILERS), default=list(COMPILERS))
    parser.add_argument("--caches", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--weights", default="default", help="a format of checkpoints.py (%(default)s)")
    parser.add_argument("--cores", type=int, nargs="+", default=[0], help="0: all; 4 starts the server on the first four")
    parser.add_argument("--prompts", type=int, nargs="+", help="these of each session, by their number from 1, in this order")
    parser.add_argument("--free", type=float, default=0, help="GiB that are left free before the session; 0: all")
    parser.add_argument("--touch", type=int, default=0, help="GiB of RAM that are written once before")
    bench = Bench(parse(parser), "sessions")
    if bench.options.touch:  # a virtual machine may get memory when it is first written, which would slow the second server
        write = f"import numpy; numpy.ones({bench.options.touch} << 30, numpy.uint8)"
        subprocess.run([sys.executable, "-c", write], check=True)
    try:
        for model in bench.options.models or (TINY if bench.options.tiny else REAL):
            bench.sessions(model)
    except OutOfTimeError:
        print(f"stopped by --limit {bench.options.limit:g}; what there is is in {bench.options.out}", flush=True)


if __name__ == "__main__":
    main()
