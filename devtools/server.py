"""Start a real ComfyUI server with the pack as a child process, and send it requests."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACK_NAME = "torch-compile-kit"
NOT_THE_PACK = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks", "devtools", "node_modules")


class ServerError(Exception):
    """The server did not start, died, or did not answer in time."""


class PromptRejectedError(Exception):
    """The server refused a prompt; `node_errors` is what the page would show on the nodes."""

    def __init__(self, answer):
        self.answer = answer
        self.node_errors = answer.get("node_errors", {})
        super().__init__(json.dumps(answer, indent=1))


def host_arguments(gpu):
    # The CPU's default attention asks for the free memory on each call, which no graph can contain.
    return [] if gpu else ["--cpu", "--use-pytorch-cross-attention"]


def prepare_base(base, root=ROOT):
    """Make a base directory (models, input, output, temp, user, custom_nodes) with the pack in its custom_nodes."""
    base = Path(base)
    for folder in ("models", "input", "output", "temp", "user", "custom_nodes"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    pack = base / "custom_nodes" / PACK_NAME
    if not pack.exists():
        try:
            pack.symlink_to(root, target_is_directory=True)
        except FileExistsError:  # by another server that starts at the same time in a folder that both use
            pass
        except OSError:
            shutil.copytree(root, pack, ignore=NOT_THE_PACK)
    return base


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(is_so, what, timeout=240):
    """Wait for a condition.

    Args:
        is_so: called again and again until it returns something true, which is returned.
        what: that condition in words, for the error.
    """
    deadline = time.monotonic() + timeout
    while not (found := is_so()):
        if time.monotonic() > deadline:
            raise ServerError(f"not within {timeout} s: {what}")
        time.sleep(0.05)
    return found


class Server:
    """A ComfyUI process.

    Args:
        host: the folder of ComfyUI.
        base: its base directory; made if it does not exist.
        arguments: more arguments of main.py.
        environment: variables that are added to this process's own.
        launcher: a command that starts the process, such as ("taskset", "-c", "0-3").
    """

    def __init__(self, host, base, gpu=False, python=sys.executable, port=None, arguments=(), environment=None, launcher=()):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.base = prepare_base(base)
        self.log_file = self.base / "server.log"
        self.client_id = uuid.uuid4().hex
        command = [
            *launcher,
            str(python),
            str(Path(host) / "main.py"),
            "--base-directory",
            str(self.base),
            "--port",
            str(self.port),
            "--database-url",
            "sqlite:///:memory:",
            "--disable-auto-launch",
            "--disable-api-nodes",
            *host_arguments(gpu),
            *arguments,
        ]
        with open(self.log_file, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.base,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )

    def __enter__(self):
        try:
            return self.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def log(self):
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def _tail(self, lines=25):
        return f"\nThe end of {self.log_file}:\n" + "\n".join(self.log().splitlines()[-lines:])

    def _check_alive(self):
        if self.process.poll() is not None:
            raise ServerError(f"ComfyUI ended with exit code {self.process.returncode}.{self._tail()}")

    def wait_until_ready(self, timeout=300):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._check_alive()
            try:
                self.get("/system_stats")
                return self
            except OSError:
                time.sleep(0.3)
        raise ServerError(f"ComfyUI did not answer within {timeout} s.{self._tail()}")

    def _request(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def get(self, path):
        return json.loads(self._request(path))

    def post(self, path, body):
        answer = self._request(path, body)
        return json.loads(answer) if answer else None

    def queue(self, prompt, timeout=900):
        """Run a prompt and return its history entry, whether it succeeded or not; raises when it is not accepted."""
        return self.finished(self.start(prompt), timeout)

    def interrupt(self):
        """Press cancel."""
        self._request("/interrupt", {})

    def start(self, prompt, extra_data=None):
        """Queue a prompt and return its id; raises when it is not accepted."""
        asked = {"prompt": prompt, "client_id": self.client_id, "extra_data": extra_data or {}}
        try:
            answer = json.loads(self._request("/prompt", asked))
        except urllib.error.HTTPError as error:
            raise PromptRejectedError(json.loads(error.read())) from None
        if answer.get("node_errors"):
            raise PromptRejectedError(answer)
        return answer["prompt_id"]

    def finished(self, prompt_id, timeout=900):
        """The history entry of a prompt, when it is over."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._check_alive()
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                return history[prompt_id]
            time.sleep(0.1)
        raise ServerError(f"the prompt did not finish within {timeout} s.{self._tail()}")

    @contextmanager
    def progress(self):
        """A list that fills with (seconds, node id, step) while prompts of this `client_id` run."""
        steps = []

        def step(kind, data):
            if kind == "progress":
                steps.append((time.perf_counter(), data["node"], data["value"]))

        with self._listening(self.client_id, step):
            yield steps

    @contextmanager
    def heard(self, client_id=None):
        """A list that fills with each (event, data) sent to the page of `client_id`; None: of this object's own `client_id`."""
        events = []
        with self._listening(client_id or self.client_id, lambda *event: events.append(event)):
            yield events

    @contextmanager
    def _listening(self, client_id, hear):
        import websocket

        connection = websocket.create_connection(f"ws://127.0.0.1:{self.port}/ws?clientId={client_id}", timeout=30)
        # Without a time limit: a long compilation sends nothing.
        connection.settimeout(None)

        def listen():
            while True:
                try:
                    message = connection.recv()
                except (OSError, websocket.WebSocketException):
                    return
                if not message:
                    return
                if isinstance(message, str):
                    event = json.loads(message)
                    hear(event["type"], event["data"])

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            yield
        finally:
            connection.close()
            listener.join(5)


def error_of(entry):
    """What went wrong with a prompt: the data of its execution_error message, or None."""
    return next((data for kind, data in entry["status"]["messages"] if kind == "execution_error"), None)


def outputs_of(entry, kind):
    """File names of a kind ("images", "latents") that a prompt saved, relative to the output directory."""
    return [
        str(Path(item["subfolder"]) / item["filename"])
        for output in entry["outputs"].values()
        for item in output.get(kind, [])
        if item.get("type") == "output"
    ]
