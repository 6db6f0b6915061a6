"""Send many prompts to one server, states (size, LoRA) in turn: compare every latent with eager's, watch the server's memory.

    python -m benchmarks.soak --host COMFYUI --out FILE           # 100 prompts on a GPU
    python -m benchmarks.soak --host COMFYUI --tiny --out FILE    # a small model on the CPU

Eager's prompts come first, each state once, on the same server. States of one size share a seed, so that an image with another
state's LoRA shows as an error: eager's latents of two such states differ by `least_difference_of_two_states` or more.
`compile_when` is in background and before first image in turn. On a GPU the first half of the prompts has all memory, and CUDA
graphs are captured; the second half has `--free` GiB on a server of its own, and weights are streamed.

Exit status 1 if a prompt fails, a latent is wrong or a reading is not flat after the first two rounds (in the first, models are
loaded and code is compiled in the background; in the second, calls wait for code that is missing). Flat is:
- memory of the server's process (RSS): the last round's largest is at most 5 % above the second's; glibc keeps freed memory in
  arenas of each thread, and a different thread allocates each time.
- open files, threads: the last round's least is no more than the second's least plus 2 (idle connections of the page).
- memory of the GPU in use: the last round's largest is at most 0.5 GiB above the second's.
"""

import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from . import sessions

# Relative error above which a latent is wrong; rounding gives less (2e-6 in fp32, 0.006 in fp16: results/soak.json).
WRONG = {True: 1e-5, False: 0.02}  # by --tiny
# By how much a reading may grow: a factor (RSS), a number (files, threads), GiB (GPU).
GROWTH, MORE, GIB = 1.05, 2, 0.5
STEPS = {True: 2, False: 6}
SIZES = {True: [(256, 256), (320, 192)], False: [(1024, 1024), (1024, 768), (768, 1024)]}
# The random LoRA of models.py are weak; at these strengths images differ clearly, also from the image without LoRA.
LORAS = (None, 4.0, 8.0)


@dataclass(frozen=True)
class State:
    """What one prompt asks for: a size, and a LoRA's strength or none."""

    size: tuple[int, int]
    lora: float | None = None

    def name(self, model: str) -> str:
        lora = f", LoRA {self.lora}" if self.lora else ""
        return f"{model}, {self.size[0]}x{self.size[1]}{lora}"

    def prompt(self, model: str, weights: str, info: dict, settings: dict | None, steps: int, index: int) -> dict:
        """The prompt as the server takes it; without our node if `settings` is None. A `denoise` for each `index` keeps ComfyUI
        from answering from its cache, and changes no image: above 0.9999 it counts as 1 (comfy/samplers.py, `set_steps`)."""
        variant = "eager" if settings is None else "ours"
        nodes = sessions.graph(model, sessions.Prompt("", lora=self.lora), 0, variant, info, settings or {}, weights)
        width, height = self.size
        nodes["latent"]["inputs"] |= {"width": width, "height": height}
        nodes["sampler"]["inputs"] |= {"steps": steps, "seed": width * 10_000 + height, "denoise": 1 - index * 1e-8}
        return nodes


class Soak:
    """Run the prompts of one server; `row` returns the results."""

    def __init__(self, bench: sessions.Bench, server, states: list[State]):
        self.bench, self.server, self.states, self.info = bench, server, states, server.get("/object_info")
        self.model, self.weights, self.tiny = bench.options.model, bench.options.weights, bench.options.tiny
        self.latents = bench.base / "latents"
        self.latents.mkdir(exist_ok=True)
        self.errors, self.kept, self.wrong = [], [], []

    def run(self, count: int, until: float) -> None:
        """Run eager's prompts, then `count` prompts; begins none after `until`, in seconds of time.monotonic."""
        apart = []
        for state in self.states:
            if "died" in (taken := self._run(state, None)):
                self.wrong.append({"state": state.name(self.model), **taken})
                return
            apart += [self._error(other) for other in self.states[: self.states.index(state)] if other.size == state.size]
            self.server.post("/session/latent", {"file": self._file(state)})
        self.apart = min(apart)
        for index in range(count):
            if time.monotonic() > until:
                print(f"stopped by --limit after {index} prompts", flush=True)
                return
            rounds, place = divmod(index, len(self.states))
            settings = {"compile_when": ("in background", "before first image")[(place + rounds) % 2]}
            state = self.states[place]
            taken = self._run(state, settings, index)
            if "died" in taken:
                self.wrong.append({"index": index, "state": state.name(self.model), **taken})
                if "over" in taken:
                    return
                continue
            self.errors.append(self._error(state))
            if not self.errors[-1] <= WRONG[self.tiny]:
                self.wrong.append({"index": index, "state": state.name(self.model), "error": self.errors[-1]})
            self.kept.append(self._keeps())
            print(index, state.name(self.model), f"error {self.errors[-1]:.2g},", self.kept[-1], flush=True)

    def _run(self, state: State, settings: dict | None, index: int = 0) -> dict:
        nodes = state.prompt(self.model, self.weights, self.info, settings, STEPS[self.tiny], index)
        return self.bench.run(self.server, nodes)

    def _file(self, state: State) -> str:
        return str(self.latents / f"{state.name(self.model)}.pt")

    def _error(self, state: State) -> float:
        """Relative error of the last latent against eager's of `state`."""
        return self.server.post("/session/latent", {"file": self._file(state), "compare": True})["error"]

    def _keeps(self) -> dict:
        """What the server's process holds: MiB, open files, threads, GiB of the GPU."""
        process = Path("/proc") / str(self.server.process.pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        held = {"rss": int(status["VmRSS"].split()[0]) // 1024, "threads": int(status["Threads"])}
        held["files"] = len(list((process / "fd").iterdir()))
        return held | {name: round(gib, 2) for name, gib in self.server.get("/session/memory").items()}

    def row(self) -> dict:
        size = len(self.states)
        rounds = [self.kept[at : at + size] for at in range(0, len(self.kept), size)]
        if len(rounds) > 1 and len(rounds[-1]) < size:  # a part of a round has not seen all states
            rounds[-2:] = [[*rounds[-2], *rounds[-1]]]
        row = {"kind": "soak", "prompts": len(self.kept), "states": [state.name(self.model) for state in self.states]}
        row |= {"wrong": self.wrong, "largest_error": float(f"{max(self.errors, default=0):.3g}")}
        row["least_difference_of_two_states"] = float(f"{getattr(self, 'apart', 0):.3g}")
        names = list(rounds[0][0]) if rounds else []
        for name in names:
            pick = min if name in ("files", "threads") else max
            row[f"{name}_by_round"] = [pick(kept[name] for kept in one) for one in rounds]
        row["not_flat"] = [name for name in names if name != "allocated" and not flat(name, row[f"{name}_by_round"])]
        return row


def flat(name: str, by_round: list[float]) -> bool:
    """Whether a reading has not grown after the second round; the module's docstring says by how much it may."""
    if len(by_round) < 3:
        return True
    second, last = by_round[1], by_round[-1]
    return last <= {"rss": second * GROWTH, "vram": second + GIB}.get(name, second + MORE)


def main() -> None:
    parser = sessions.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--model", choices=list(sessions.SESSIONS), help="sdxl; with --tiny flux_small")
    parser.add_argument(
        "--free", type=float, default=4.0, help="GiB that are left free for the half that streams; 0: none does"
    )
    parser.add_argument("--weights", default="default", help="a format of checkpoints.py (%(default)s)")
    options = sessions.parse(parser)
    options.model = options.model or ("flux_small" if options.tiny else "sdxl")
    bench, count = sessions.Bench(options, "soak"), options.prompts
    states = [State(size, lora) for lora, size in itertools.product(LORAS, SIZES[options.tiny])]
    bench.make_files(options.model, [options.weights])
    packs = [sessions.GGUF_PACK] if options.weights == "gguf" else []
    parts = [("CUDA graphs", 0.0, count - count // 2), ("streaming", options.free, count // 2)]
    if options.tiny or not options.free:
        parts = [("small models" if options.tiny else "CUDA graphs", 0.0, count)]
    rows = []
    for left, (name, gib, prompts) in zip(range(len(parts), 0, -1), parts, strict=True):
        bench.clear(*sessions.KEPT)
        with bench.server("ours", packs=packs) as server:
            of = "" if options.weights == "default" else f", {options.model} {options.weights}"
            row = {"part": name + of, "free_gib": gib}
            if gib:
                row |= server.post("/session/free", {"gib": gib})
            soak = Soak(bench, server, states)
            soak.run(prompts, time.monotonic() + bench.left() / left)
            row |= {"alive": server.process.poll() is None, **soak.row()}
            if row["alive"] and not options.tiny:
                row |= server.get("/session/graphs")
        rows.append(row)
        bench.known["rows"].append(row)
        bench.save()
        print(json.dumps(row), flush=True)
    sys.exit(any(row["wrong"] or row["not_flat"] or not row["alive"] for row in rows))


if __name__ == "__main__":
    main()
