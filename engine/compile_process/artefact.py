"""Pack the code of a graph into the bytes that go to other processes, to disk and to other machines."""

import json
from dataclasses import dataclass, field
from typing import Any

from ..cache.code_store import header_of
from ..cache.environment import cpu_digest


@dataclass(frozen=True)
class Code:
    """What the compile process made of a graph.

    Args:
        guards: an expression that must hold for the sizes among the inputs, see `ShapeEnv.evaluate_guards_expression`; None:
            the code fits all.
        files: paths and contents of libraries that the artefact is loaded with.
        inputs: on which its kernels are loaded and tuned, see `Inputs.packed`; empty: the first run does that.
        cpu: the CPU for which the libraries were built, see `cpu_digest`.
        name: of the entry in which the code is kept.
        was_kept: the code was read from an entry, and nothing was lowered.
    """

    artefact: bytes
    guards: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    inputs: str = ""
    cpu: str = field(default_factory=cpu_digest)
    name: str | None = None
    was_kept: bool = False

    @property
    def is_for_this_cpu(self) -> bool:
        return not self.files or self.cpu == cpu_digest()

    def packed(self, about: dict[str, Any]) -> bytes:
        """A line of JSON (`about`, the sizes of the parts, guards, CPU), then the artefact, the inputs and the files."""
        files = [[name, len(content)] for name, content in self.files.items()]
        inputs = self.inputs.encode()
        sizes = {"artefact": len(self.artefact), "inputs": len(inputs), "files": files}
        header = {**about, **sizes, "guards": self.guards, "cpu": self.cpu}
        return b"".join([json.dumps(header).encode(), b"\n", self.artefact, inputs, *self.files.values()])

    @classmethod
    def unpacked(cls, content: bytes, name: str | None = None) -> "Code":
        """The code in an entry of that name, or in an answer. Raises ValueError, KeyError or TypeError for other content."""
        header, body = header_of(content), content[content.index(b"\n") + 1 :]
        artefact, inputs = header["artefact"], header["artefact"] + header["inputs"]
        at, files = inputs, {}
        for file, size in header["files"]:
            files[file] = body[at : at + size]
            at += size
        if at != len(body):
            raise ValueError("it is cut off")
        return cls(
            body[:artefact], header["guards"], files, body[artefact:inputs].decode(), header["cpu"], name, name is not None
        )
