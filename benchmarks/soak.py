"""Send many prompts to one server, states of a model in turn: compare every latent with eager's, watch what the server keeps.

    python -m benchmarks.soak --host COMFYUI --out FILE           # 100 prompts on a GPU
    python -m benchmarks.soak --host COMFYUI --tiny --out FILE    # a small model on the CPU

Eager's prompts come first, each state once, in the same server; states of the same size share their seed, so an image of the
wrong LoRA or size would be seen: how far eager's own are apart stands beside the errors. `compile_when` is in the background
and before the first image in turn. On a GPU the first half has all memory, where CUDA graphs are captured, the second `--free`
GiB, where weights are streamed, in a server of its own.

Ends with 1 where something is wrong. What counts as flat, after the first two rounds (in the first the host loads and compiles
in the background, in the second all waits for its code):
- memory of the server's process (RSS): the last round's largest is at most 5 % above the second's; glibc keeps freed memory in
  arenas for each thread, and which thread allocates is another each time.
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

# Relative errors of latents: rounding gives less (2e-6 in fp32, 0.006 in fp16: results/soak.json).
WRONG = {True: 1e-5, False: 0.02}  # by --tiny
# What may be added to a reading: a share (process' memory), a number (files, threads), GiB (GPU).
GROWTH, MORE, GIB = 1.05, 2, 0.5
STEPS = {True: 2, False: 6}
SIZES = {True: [(256, 256), (320, 192)], False: [(1024, 1024), (1024, 768), (768, 1024)]}
# The random LoRA (models.py) are weak: at these strengths each image is far from the other, and from that without.
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
        """As the server takes it; without our node where `settings` is None. The host makes each `index` anew, and the same of
        all: any share from 0.9999 on it takes as the whole (comfy/samplers.py, `set_steps`)."""
        variant = "eager" if settings is None else "ours"
        nodes = sessions.graph(model, sessions.Prompt("", lora=self.lora), 0, variant, info, settings or {}, weights)
        width, height = self.size
        nodes["latent"]["inputs"] |= {"width": width, "height": height}
        nodes["sampler"]["inputs"] |= {"steps": steps, "seed": width * 10_000 + height, "denoise": 1 - index * 1e-8}
        return nodes


class Soak:
    """The prompts of one server; `row` is what comes out."""

    def __init__(self, bench: sessions.Bench, server, states: list[State]):
        self.bench, self.server, self.states, self.info = bench, server, states, server.get("/object_info")
        self.model, self.weights, self.tiny = bench.options.model, bench.options.weights, bench.options.tiny
        self.latents = bench.base / "latents"
        self.latents.mkdir(exist_ok=True)
        self.errors, self.kept, self.wrong = [], [], []

    def run(self, count: int, until: float) -> None:
        """Eager's, then so many prompts; none is begun after `until`, in seconds of time.monotonic."""
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
        """How far the last latent is from eager's of a state."""
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
    """Whether a reading has not grown after the second round; see above."""
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
