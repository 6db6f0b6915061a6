"""Repair files of trainers that saved a compiled model: their keys hold `_orig_mod`, which no loader of the host accepts.

PyTorch's wrapper of a compiled module keeps the module under that name (torch/_dynamo/eval_frame.py, `OptimizedModule`).
Renaming the keys is all that such a file needs: the header is written anew, the weights are copied as they are.
"""

import json
import re
import shutil
from pathlib import Path

import folder_paths

from ...errors import InvalidSetting
from ...files import replace
from ...messages.words import say

KINDS = ("loras", "diffusion_models", "checkpoints")
_WRAPPER = re.compile(r"_orig_mod[._]")  # in keys of LoRA files dots are underscores
_MAX_HEADER = 100 * 2**20  # bytes; longer than that of any model


def files() -> list[str]:
    """`KIND/NAME` of each .safetensors file of the host's folders."""
    return [
        f"{kind}/{name}" for kind in KINDS for name in folder_paths.get_filename_list(kind) if name.endswith(".safetensors")
    ]


def plain_key(key: str) -> str:
    return _WRAPPER.sub("", key)


def repair(choice: str) -> tuple[Path, str]:
    """Write a copy with plain keys beside the file, unless the file has them; returns the file to load, and a sentence.

    Raises:
        InvalidSetting: no such file, no safetensors file, two of its keys would become the same, or another file has the copy's
            name.
    """
    path = _path_of(choice)
    with path.open("rb") as source:
        header = _read_header(source, choice)
        renamed: dict[str, object] = {}
        for key, value in header.items():
            if plain_key(key) in renamed:
                raise InvalidSetting("file", choice, f"it holds {plain_key(key)!r} twice, compiled and plain: save it anew.")
            renamed[plain_key(key)] = value
        count = sum(key not in renamed for key in header)
        if not count:
            return path, say("nothingToRepair", path.name)
        target = path.with_name(f"{path.stem}_repaired{path.suffix}")
        text = json.dumps(renamed, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the weights stay aligned
        done = target, say("repaired", count, len(header) - ("__metadata__" in header), target.name)
        if target.exists():
            is_later = target.stat().st_mtime_ns >= path.stat().st_mtime_ns
            if is_later and _begins_with(target, text, path.stat().st_size - source.tell()):
                return done  # an earlier prompt's
            raise InvalidSetting("file", choice, f"{target.name} is there already: use it, or delete it first.")
        unfinished = target.with_suffix(".partial")
        try:
            with unfinished.open("wb") as out:
                out.write(len(text).to_bytes(8, "little") + text)
                shutil.copyfileobj(source, out, 2**24)
            replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)
    return done


def _begins_with(file: Path, header: bytes, rest: int) -> bool:
    """Whether a safetensors file has this header, and so many bytes behind it."""
    with file.open("rb") as copy:
        begins = copy.read(8 + len(header)) == len(header).to_bytes(8, "little") + header
    return begins and file.stat().st_size == 8 + len(header) + rest


def _path_of(choice: str) -> Path:
    kind, _, name = choice.partition("/")
    path = folder_paths.get_full_path(kind, name) if kind in KINDS else None
    if path is None or not name.endswith(".safetensors"):
        raise InvalidSetting("file", choice, f"use a .safetensors file of {', '.join(KINDS)}.")
    return Path(path)


def _read_header(source, choice: str) -> dict[str, object]:
    try:
        length = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(length)) if length <= _MAX_HEADER else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise InvalidSetting("file", choice, "it is no safetensors file, or damaged: fetch it again.")
    return header
