"""What the GPU's clock and power are while a model runs, eager and compiled in turn: whether the chip is at its power limit.

    python -m benchmarks.clocks --host COMFYUI --model flux

Needs a CUDA device and NVIDIA's management library for Python (nvidia-ml-py, pynvml).
"""

import argparse
import json
import os
import threading

from . import models, session, variants

SECONDS_BETWEEN = 0.02
AT_POWER_LIMIT = 0x4  # nvmlClocksEventReasonSwPowerCap


class Watch:
    """Notes clock (MHz), power (W) and whether the driver lowers the clock for power, as long as it is entered."""

    def __init__(self, device: int):
        import pynvml

        pynvml.nvmlInit()
        self.library, self.device = pynvml, pynvml.nvmlDeviceGetHandleByIndex(device)
        self.clocks, self.powers, self.limited = [], [], []

    def __enter__(self):
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        nvml = self.library
        while not self._over.wait(SECONDS_BETWEEN):
            self.clocks.append(nvml.nvmlDeviceGetClockInfo(self.device, nvml.NVML_CLOCK_SM))
            self.powers.append(nvml.nvmlDeviceGetPowerUsage(self.device) / 1000)
            self.limited.append(bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.device) & AT_POWER_LIMIT))

    def summary(self) -> dict:
        return {
            "sm_mhz": round(session.median(self.clocks)),
            "watts": round(session.median(self.powers)),
            "at_power_limit": round(sum(self.limited) / len(self.limited), 2),
            "samples": len(self.clocks),
        }

    def limits(self) -> dict:
        nvml = self.library
        return {
            "most_sm_mhz": nvml.nvmlDeviceGetMaxClockInfo(self.device, nvml.NVML_CLOCK_SM),
            "power_limit": round(nvml.nvmlDeviceGetEnforcedPowerLimit(self.device) / 1000),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--settings", default='{"mode": "reduce-overhead"}')
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch = session.enter(options.host)
    patcher = models.build(options.model, torch.device("cuda"))
    settings = json.loads(options.settings)
    running = {
        name: variants.apply(name, patcher, session.KIT, **(settings if name == "ours" else {})) for name in ("eager", "ours")
    }
    watches = {name: Watch(torch.cuda.current_device()) for name in running}
    times = {name: [] for name in running}
    for model in running.values():
        session.sample(model, options.model, 2)
    for _ in range(options.rounds):
        for name, model in running.items():
            with watches[name]:
                times[name] += session.sample(model, options.model, options.steps)[1][1:]
    for name, seconds in times.items():
        row = {"kind": "clocks", "model": options.model, "variant": name, "settings": settings if name == "ours" else {}}
        row |= {"step": round(session.median(seconds), 5), "fastest": round(min(seconds), 5)}
        print("ROW", json.dumps(row | watches[name].summary() | watches[name].limits()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
