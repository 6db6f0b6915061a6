"""Start compile processes by a fork of one that has imported PyTorch's compiler: three seconds of a core less each.

    python forked.py FD

The process of this script reads from its socket FD, for each process that is wanted, its environment, and gets its three pipes.
It forks twice, so that who asked, a subreaper meanwhile, becomes the parent. That the process starts without all this is tested
by `TestWorkers`, `test_it_ends_with_its_parent`, `test_stand_in_card.py`, and on a server.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
# PyTorch reads these when it is imported.
READ_AT_IMPORT = "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_WORKER_START", "CUDA_VISIBLE_DEVICES"


class Forks:
    """The process that forks, and `Popen`, to be put in the place of subprocess'."""

    def __init__(self, environment):
        self._python, self._read_at_import = sys.executable, [environment.get(name) for name in READ_AT_IMPORT]
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    def close(self):
        self._socket.close()
        self._process.wait(60)

    def can_start(self, command, environment):
        """Whether the process would be the same if it were started."""
        return command[0] == self._python and [environment.get(name) for name in READ_AT_IMPORT] == self._read_at_import

    def fork(self, script, environment, pipes):
        """The pid of a child of this process that runs the script."""
        become_reaper = ctypes.CDLL(None).prctl
        assert become_reaper(SUBREAPER, 1) == 0
        try:
            asked = json.dumps([script, environment]).encode()
            socket.send_fds(self._socket, [len(asked).to_bytes(8, "little")], pipes)
            self._socket.sendall(asked)
            return int.from_bytes(received(self._socket, 8), "little")
        finally:
            become_reaper(SUBREAPER, 0)

    @property
    def Popen(self):  # noqa: N802
        forks = self

        class Popen(subprocess.Popen):
            def _execute_child(self, args, *more):
                environment = more[5]
                if not forks.can_start(args, environment or {}):
                    return super()._execute_child(args, *more)
                stdin, stdout, stderr = more[9], more[12], more[14]
                self.pid = forks.fork(args[-1], environment, [stdin, stdout, stderr])
                self._child_created = True
                for fd in (stdin, stdout, stderr):
                    os.close(fd)

        return Popen


def received(stream, length):
    found = b""
    while len(found) < length:
        part = stream.recv(length - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def serve(stream):
    import torch._inductor.compile_fx  # noqa: F401

    while True:
        length, pipes, _, _ = socket.recv_fds(stream, 8, 3)
        if not length:
            return
        script, environment = json.loads(received(stream, int.from_bytes(length, "little")))
        reads, writes = os.pipe()
        first = os.fork()
        if not first:
            if second := os.fork():
                os.write(writes, second.to_bytes(8, "little"))
                os._exit(0)
            stream.close()
            become(script, environment, pipes)
            return
        os.waitpid(first, 0)  # from now on who asked is the parent
        stream.sendall(os.read(reads, 8))
        for fd in (*pipes, reads, writes):
            os.close(fd)


def become(script, environment, pipes):
    """As after `exec`."""
    os.setsid()
    for number, fd in enumerate(pipes):
        os.dup2(fd, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script]
    sys.path[0] = os.path.dirname(script)
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    main["__file__"] = script
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    exec(code, main)  # noqa: S102


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve(socket.socket(fileno=int(sys.argv[1])))
