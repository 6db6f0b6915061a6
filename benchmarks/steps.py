"""Measure steps of a model: warm, with little memory, with LoRA, first of a process, and where a first one goes."""

import json
import logging
import shutil
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from . import host, models
from .results import SMALL

# model -> our best setting for it
BEST = {
    "flux": {"mode": "reduce-overhead"},
    "qwen_image": {"mode": "reduce-overhead"},
    "wan14": {},
    "z_image": {"mode": "reduce-overhead"},
    "hunyuan_video": {},
    "flux_fp8": {},
    "flux_fp8_scaled": {},
    "sdxl": {"mode": "reduce-overhead"},
    "sd15": {"mode": "reduce-overhead"},
}
SLOW = {
    "wan14": {"steps": 5, "rounds": 1},
    "hunyuan_video": {"steps": 5, "rounds": 1},
    "qwen_image": {"steps": 6, "rounds": 1},
}
# Attention kernels of PyTorch, by device: how far eager's results with these are apart is the noise of a comparison.
KERNELS = {
    "cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    "cpu": (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
}
# (how the weights are held, GiB free)
LORA_MODES = [("legacy", 0), ("dynamic", 0), ("dynamic", 14), ("legacy", 14)]
# (name, (LoRA, strength) or None)
LORA_STATES = [
    ("none", None),
    ("LoRA 1, 0.8", (1, 0.8)),
    ("LoRA 1, 1.2", (1, 1.2)),
    ("LoRA 2, 0.8", (2, 0.8)),
    ("removed", None),
]
# Starts of a process: `first` compiles, `second` finds all on disk, `early` too, with ENCODING seconds between node and
# sampler; `carried` has an empty cache and the file that `first` saved, `carried early` is both; `eager` compiles nothing.
RUNS = ("first", "second", "early", "carried", "carried early", "eager")
ENCODING = 5.0
CARRIED = "carried.tckcache"
TRACES = "TORCH_TRACE"
COMPILATION, TUNING = "dynamo", "CachingAutotuner.benchmark_all_configs"
SHORT = 0.05


def step_jobs(options) -> list[dict]:
    """Eager and ours of a model take turns in one process; a peer has its own, with eager in it where the model is small."""
    jobs = []
    for model in options.models:
        common = {"model": model, "settings": options.settings or BEST.get(model, {}), **SLOW.get(model, {})}
        both = [variant for variant in ("eager", "ours") if variant in options.variants]
        eager = ["eager"] if model in SMALL and "eager" in options.variants else []
        peers = [[*eager, variant] for variant in ("core", "kjnodes") if variant in options.variants]
        jobs += [{**common, "variants": variants} for variants in ([both] if both else []) + peers]
    return jobs


def step(options):
    """Seconds of a warm step; variants take turns on one model, so that a chip that gets warm slows all of them."""
    patcher, name = models.build(options.model, host.device()), options.model
    reference = Path(options.scratch) / f"{name}.pt"
    rows, running, times, latents = {}, {}, {}, {}
    for variant in options.variants:
        ours = variant == "ours"
        row = rows[variant] = {"variant": variant, "settings": options.settings if ours else {}}
        row |= {"head_start": options.head_start} if ours else {}
        with host.noted(row):
            model = host.apply(variant, patcher, options.kjnodes, **options.settings)
            time.sleep(options.head_start if ours else 0)
            latents[variant], first = host.sample(model, name, options.steps)
            row["first_step"] = first[0]
            running[variant], times[variant] = model, []
    if "eager" in latents:
        torch.save(latents["eager"], reference)
    before = host.counts()["graphs"]
    for _ in range(options.rounds):
        for variant, model in running.items():
            times[variant] += host.sample(model, name, options.steps)[1][1:]
    compiled = host.counts()["graphs"] - before
    for variant, seconds in times.items():
        row = rows[variant]
        row |= {"step": host.median(seconds), "fastest": min(seconds), "graphs_in_warm_rounds": compiled}
        row["cold_start"] = row["first_step"] - row["step"]
        if reference.exists():
            row["error"] = host.relative_error(latents[variant], torch.load(reference))
    for size in options.more:
        width, height, frames = (*map(int, size.split("x")), 1)[:3]
        for variant, model in running.items():
            _, seconds = host.sample(model, name, 4, size=(width, height, frames))
            more = {"size": size, "first": seconds[0], "step": host.median(seconds[1:])}
            rows[variant].setdefault("more", []).append(more)
    if options.noise and "eager" in latents:  # last: what it loads would make the other variants' first steps shorter
        device = host.device().type
        rows["eager"]["attention_noise"] = attention_noise(patcher, name, options.steps, device, latents["eager"])
    yield from rows.values()


def attention_noise(patcher, model: str, steps: int, device: str, expected) -> dict[str, float]:
    """Relative error of the final latent against plain eager, per kernel that this device can run for all of the model.

    Args:
        patcher: the model, not compiled.
        expected: the final latent of plain eager.
    """
    attention = host.kit("inductor.attention_kernels")
    errors = {}
    for kernel in KERNELS[device]:
        override = _Counted(attention.override_with([kernel]), attention.HOST_FUNCTION)
        other = patcher.clone()
        other.model_options["transformer_options"]["optimized_attention_override"] = override
        try:
            latent, _ = host.sample(other, model, steps)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"not measured with {kernel.name}: {error}")
            continue
        if override.calls:  # else the host ran what it always runs
            errors[kernel.name] = host.relative_error(latent, expected)
    return errors


class _Counted:
    """The override, with the number of calls that it did not hand back to the host."""

    def __init__(self, override, host_function: str):
        self._override, self._host_function, self.calls = override, host_function, 0

    def __call__(self, func, *args, **kwargs):
        self.calls += func.__name__ == self._host_function and not kwargs.get("enable_gqa", False)
        return self._override(func, *args, **kwargs)


def load_from_file(name: str):
    """As UNETLoader does."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(models.weights_file(name)))


class Ballast:
    """Plain allocations, as another program makes them; made before the model, whose own memory is what it must do with."""

    def __init__(self):
        self._blocks = []
        self._free_at_first = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0

    def leave(self, gib: float) -> None:
        """Take memory until so much is left for the model; 0 takes none."""
        if gib:
            torch.cuda.empty_cache()
            wanted = int(self._free_at_first - gib * host.GIB) - self.size()
            self._blocks.append(torch.empty(wanted, dtype=torch.uint8, device="cuda"))

    def size(self) -> int:
        return sum(block.nbytes for block in self._blocks)


def low_vram_jobs(options) -> list[dict]:
    """A process a variant and kind of VRAM management; partial loading has one amount. Core's node cannot do with that."""
    variants = [(variant, variant, {}) for variant in ("eager", "core", "kjnodes", "ours") if variant in options.variants]
    if "ours" in options.variants:
        variants.insert(-1, ("ours", "ours, same attention", {"attention": "comfyui"}))
    return [
        {"model": model, "vram": vram, "variants": [variant], "label": label, "settings": settings, "free": free}
        for model in options.models
        for vram, free in (("dynamic", options.free), ("legacy", [14]))
        for variant, label, settings in variants
        if not (vram == "legacy" and variant == "core")
    ]


def low_vram(options):
    """Steps with less and less memory free, for one variant."""
    import comfy.model_management

    ballast, (variant,) = Ballast(), options.variants
    model = host.apply(variant, load_from_file(options.model), options.kjnodes, **options.settings)
    reference = Path(options.scratch) / f"{options.model}.pt"
    for free in options.free:
        if free and not model.is_dynamic():  # nothing but the host's loader gives its memory back
            comfy.model_management.unload_all_models()
        ballast.leave(free)
        row, again = {"variant": options.label, "vram": options.vram, "free_gib": free}, {}
        with host.noted(row):
            row["first_step"] = host.sample(model, options.model, options.steps)[1][0]
        if "died" not in row:
            with host.noted(again):
                latent, seconds = host.sample(model, options.model, options.steps)
                row |= {"step": host.median(seconds[1:]), "steps": seconds}
                left, total = torch.cuda.mem_get_info()
                row["used_gib"] = (total - left - ballast.size()) / host.GIB
                if variant == "eager" and not reference.exists():
                    torch.save(latent, reference)
                if reference.exists():
                    row["error"] = host.relative_error(latent, torch.load(reference))
            row |= {"graphs_in_second_run": again["graphs"]} | {k: v for k, v in again.items() if k == "died"}
        yield row
        if "died" in row:
            return


def lora_jobs(options) -> list[dict]:
    """A process for each way in which ComfyUI can hold the weights; on a CPU there is one."""
    return [
        {"model": model, "vram": vram, "free": free}
        for model in options.models
        for vram, free in (LORA_MODES[:1] if model.endswith("_small") else LORA_MODES)
    ]


def lora(options):
    """LoRA added, made stronger, swapped and removed: graphs, seconds, errors of eager and ours."""
    import comfy.sd

    ballast, patcher = Ballast(), load_from_file(options.model)
    loras = {seed: models.lora_weights(patcher.model.diffusion_model, seed) for seed in (1, 2)}
    ballast.leave(options.free)
    ours = host.apply("ours", patcher, **options.settings)
    host.sample(ours, options.model, options.steps)  # what a warmup does, without a LoRA
    for name, chosen in LORA_STATES:
        row = {"vram": options.vram, "free_gib": options.free, "state": name}
        latents = {}
        for variant, model in (("eager", patcher), ("ours", ours)):
            if chosen is not None:
                model, _ = comfy.sd.load_lora_for_models(model, None, loras[chosen[0]], chosen[1], 0)
            before = host.counts()
            latents[variant], seconds = host.sample(model, options.model, options.steps)
            row |= {f"{variant}_step": host.median(seconds[1:]), f"{variant}_first": seconds[0]}
            row |= {key: count - before[key] for key, count in host.counts().items()}  # the last are ours
        yield {**row, "error": host.relative_error(latents["ours"], latents["eager"])}


def restart_jobs(options) -> list[dict]:
    """One process after another with one user folder; what is carried goes to an empty one. A run may be there twice."""
    return [
        {"model": model, "run": run, "user": f"{model}/{f'{run} {number}' if run.startswith('carried') else 'own'}"}
        for model in options.models
        for number, run in enumerate(options.runs)
    ]


def _user_folder(options) -> Path:
    return Path(options.scratch) / options.user


def prepare_user_folder(options) -> None:
    """Make it, with the file that is carried."""
    kept = _user_folder(options) / "torch-compile-kit"
    kept.mkdir(parents=True, exist_ok=True)
    if options.run.startswith("carried"):
        shutil.copy(Path(options.scratch) / options.model / "own" / "torch-compile-kit" / CARRIED, kept)


def restart(options):
    """What the first step of a new process takes above a warm one.

    As in a queue, preparing begins when the prompt is queued (nodes/routes.py), and the model is made after that: `head_start`
    is how long that took until sampling began. Random weights are made on the GPU in less time than a user's model is loaded.
    `traced` counts the frames that Dynamo traced, `error` is the distance from eager's result in the same process.
    """
    import comfy.model_management
    import folder_paths
    from torch._dynamo.utils import counters

    folder_paths.set_user_directory(str(_user_folder(options)))
    logging.getLogger("torch-compile-kit").setLevel(logging.DEBUG)  # says what the preparation took
    queued, name, eager = time.perf_counter(), options.model, options.run == "eager"
    if not eager:
        host.kit("host.model.user_folder").get_ready(host.kit("settings").CompileSettings(**options.settings))
    patcher = load_from_file(name) if options.from_file else models.build(name, host.device())
    files = host.kit("host.nodes.cache_files")
    if options.run.startswith("carried"):
        print(files.load_cache(CARRIED))
    model = host.apply("eager" if eager else "ours", patcher, **options.settings)
    if options.from_file:  # as the sampler does before its first step; nothing is left to load in it
        comfy.model_management.load_models_gpu([model], memory_required=0)
    time.sleep(ENCODING if options.run.endswith("early") else 0)
    head_start = time.perf_counter() - queued
    first = host.sample(model, name, 4)[1][0]
    latent, warm = host.sample(model, name, options.steps)
    step = host.median(warm[1:])
    row = {"run": options.run, "settings": options.settings, "from_file": options.from_file, "head_start": head_start}
    row |= {"first_step": first, "step": step, "fastest": min(warm[1:]), "above": first - step}
    if not eager:
        report = host.kit("notices.report").report_json()["models"][0]
        row |= {key: report[key] for key in ("compile_seconds", "graphs", "graphs_from_disk")}
        row["traced"] = counters["frames"]["total"]
        row["processes"] = host.kit("compile_process.client").compile_process.started
        row["error"] = host.relative_error(latent, host.sample(patcher.clone(), name, options.steps)[0])
    if options.run == "first":
        print(files.save_cache(model, CARRIED)[1])
    yield row


def cold(options):
    """Where a cold start goes: the phases of compiling in a first step with nothing on disk, as PyTorch itself notes them.

    A phase's seconds are its own, without the phases inside it. `tuning` is when new kernels run first and are measured;
    `outside` is what remains: the choice of an attention kernel, code that the GPU's driver loads.
    """
    import os

    patcher = models.build(options.model, host.device())
    host.sample(host.apply("eager", patcher), options.model, 2)
    model = host.apply("ours", patcher, **options.settings)
    time.sleep(options.head_start)
    _, first = host.sample(model, options.model, 4)
    own, outermost = phases(Path(os.environ[TRACES]))
    start = first[0] - host.median(host.sample(model, options.model, options.steps)[1][1:])
    report = host.kit("notices.report").report_json()["models"][0]
    yield {
        "settings": options.settings,
        "head_start": options.head_start,
        "cold_start": start,
        "graphs": host.counts()["graphs"],
        "compile_seconds": report["compile_seconds"],
        "tuning": sum(outermost[TUNING], 0.0),
        "outside": start - sum(outermost[COMPILATION] + outermost[TUNING]),
        "each_graph": outermost[COMPILATION],
        "phases": {name: s for name, s in sorted(own.items(), key=lambda item: -item[1]) if s >= SHORT},
    }


def phases(folder: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    """From PyTorch's trace (torch/_dynamo/utils.py, ChromiumEventLogger).

    Returns:
        Own seconds of each phase inside compilations, and the seconds of everything outermost by its name.
    """
    own: dict[str, float] = defaultdict(float)
    outermost: dict[str, list[float]] = defaultdict(list)
    inside: dict[str, float] = defaultdict(float)
    open_phases: list[list] = []
    for event in _events(folder):
        if event["ph"] == "B":
            open_phases.append([event["name"], event["ts"], 0.0])
            continue
        while any(name == event["name"] for name, _, _ in open_phases):  # a phase that failed has no end
            name, began, inner = open_phases.pop()
            took = (event["ts"] - began) / 1e6
            inside[name] += took - inner
            if open_phases:
                open_phases[-1][2] += took
            else:
                outermost[name].append(took)
                if name == COMPILATION:  # not the preparation, in its thread
                    for phase, seconds in inside.items():
                        own[phase] += seconds
                inside.clear()
            if name == event["name"]:
                break
    return own, outermost


def _events(folder: Path) -> list[dict]:
    events = []
    for file in folder.glob("*.log"):
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            if '"chromium_event"' in line:
                end = number + 1
                while end < len(lines) and lines[end].startswith("\t"):
                    end += 1
                events.append(json.loads("\n".join(lines[number + 1 : end])))
    return [event for event in events if event.get("ph") in "BE"]
