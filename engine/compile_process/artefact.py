"""Pack the code of a graph into the bytes that go to other processes, to disk and to other machines."""

from dataclasses import dataclass, field
from typing import Any

from ..cache import code_store
from ..cache.environment import cpu_digest


class LowerInline(Exception):
    """Tell why a graph must be lowered in the call that traced it: for example, which part cannot be serialized."""


@dataclass(frozen=True)
class Code:
    """What the compile process made of a graph."""

    artefact: bytes
    # Must hold for the sizes among the inputs, see `ShapeEnv.evaluate_guards_expression`; None: the code fits all.
    guards: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)  # paths and contents of libraries that the artefact is loaded with
    inputs: list | None = None  # on which its kernels are loaded and tuned, see `Inputs.given`; None: the first run does that
    cpu: str = field(default_factory=cpu_digest)  # the CPU that the libraries were built for
    name: str | None = None  # of the store's entry with the code
    was_kept: bool = False  # the code was read from an entry, and nothing was lowered

    @property
    def is_for_this_cpu(self) -> bool:
        return not self.files or self.cpu == cpu_digest()

    def packed(self, about: dict[str, Any]) -> bytes:
        header = {**about, "guards": self.guards, "inputs": self.inputs, "cpu": self.cpu}
        return code_store.packed(header, {"artefact": self.artefact, **self.files})

    @classmethod
    def unpacked(cls, content: bytes, name: str | None = None) -> "Code":
        """The code in an entry of that name, or in an answer. Raises ValueError, KeyError or TypeError for other content."""
        header, files = code_store.unpacked(content)
        artefact = files.pop("artefact")
        return cls(artefact, header["guards"], files, header["inputs"], header["cpu"], name, name is not None)
