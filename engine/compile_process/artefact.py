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
        cpu: the CPU for which the libraries were built, see `cpu_digest`.
        name: of the entry in which the code is kept.
        was_kept: the code was read from an entry, and nothing was lowered.
    """

    artefact: bytes
    guards: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    cpu: str = field(default_factory=cpu_digest)
    name: str | None = None
    was_kept: bool = False

    def packed(self, about: dict[str, Any]) -> bytes:
        """A line of JSON (`about`, the sizes of the parts, guards, CPU), then the artefact and the files."""
        files = [[name, len(content)] for name, content in self.files.items()]
        header = {**about, "artefact": len(self.artefact), "guards": self.guards, "files": files, "cpu": self.cpu}
        return b"".join([json.dumps(header).encode(), b"\n", self.artefact, *self.files.values()])

    @classmethod
    def unpacked(cls, content: bytes) -> "Code":
        """Raises ValueError, KeyError or TypeError for other content."""
        header, body = header_of(content), content[content.index(b"\n") + 1 :]
        at, files = header["artefact"], {}
        for name, size in header["files"]:
            files[name] = body[at : at + size]
            at += size
        if at != len(body):
            raise ValueError("it is cut off")
        return cls(body[: header["artefact"]], header["guards"], files, header["cpu"])
