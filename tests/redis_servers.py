"""A real redis-server for tests, and ways in which it can be bad."""

import contextlib
import shutil
import socket
import socketserver
import subprocess
import threading
import time

import pytest

# What signs the entries of workers that share code.
SECRET = "a secret of more than sixteen characters"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """A server without a disk; used as a context."""

    def __init__(self, *options):
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed: nothing was shared through it")
        self.redis = pytest.importorskip("redis", reason="redis-server is not installed: nor is its client for Python")
        self.options, self.port, self.process = options, free_port(), None

    def __enter__(self):
        self.start()
        return self

    def start(self):
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                self.client = self.redis.Redis(port=self.port)
                return self.client.ping()
            except self.redis.exceptions.ConnectionError:
                time.sleep(0.05)
        raise AssertionError("redis-server did not start")

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def entries(self):
        return {name: self.client.get(name) for name in self.client.scan_iter() if not name.endswith(b":claim")}

    def __exit__(self, *_exc):
        self.process.kill()  # also one that is stopped
        self.process.wait()


class Proxy(socketserver.ThreadingTCPServer):
    """Between a client and a server; used as a context.

    Args:
        delay: seconds that each piece waits on its way back.
        cut_after: bytes of the server's after which the connection ends.
    """

    daemon_threads = allow_reuse_address = True

    def __init__(self, port, delay=0.0, cut_after=None):
        super().__init__(("127.0.0.1", 0), None)
        self.to, self.delay, self.cut_after, self.bytes = port, delay, cut_after, 0
        self._silenced = 0

    def silence(self):
        """What is open passes nothing any more, as when a firewall has forgotten a connection that was idle."""
        self._silenced += 1

    def finish_request(self, request, _address):
        with socket.create_connection(("127.0.0.1", self.to)) as server:
            threading.Thread(target=self._pump, args=(request, server), daemon=True).start()
            self._pump(server, request, self.delay, self.cut_after)

    def _pump(self, source, sink, delay=0.0, left=None):
        opened = self._silenced
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                if opened != self._silenced:
                    continue
                time.sleep(delay)
                sink.sendall(piece[:left])
                if left is not None and (left := left - len(piece)) <= 0:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.server_address[1]}/0"

    def __exit__(self, *exc):
        self.shutdown()
        super().__exit__(*exc)
