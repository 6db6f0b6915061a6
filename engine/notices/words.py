"""Say sentences in the user's language, from locales/LANGUAGE/report.json, or in English where there is none."""

import functools
import json
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "locales"
LANGUAGES = tuple(folder.name for folder in FOLDER.iterdir())
ENGLISH = "en"
_spoken = [ENGLISH]


def speak(language: object) -> None:
    """Use a language from now on: the value of ComfyUI's setting `Comfy.Locale`."""
    _spoken[0] = str(language) if language in LANGUAGES else ENGLISH


def say(key: str, *values: object) -> str:
    """A sentence, or a part of one, with `values` in the places of %1, %2."""
    return _filled(_texts(_spoken[0]).get(key) or _texts(ENGLISH)[key], values)


def say_in_english(key: str, *values: object) -> str:
    return _filled(_texts(ENGLISH)[key], values)


def _filled(text: str, values: tuple[object, ...]) -> str:
    return re.sub(r"%(\d)", lambda place: str(values[int(place[1]) - 1]), text)  # at once: values may hold such signs


def told(key: str, *values: object) -> list:
    """A text that the page says, in its own language: a key of `torchCompileKit` in locales/LANGUAGE/main.json, and values,
    which may be such texts themselves, or lists of them (js/words.js)."""
    return [key, *values]


def in_words(text: object, language: str | None = None) -> str:
    """What the page shows for a text of `told`, in the user's language or in `language`."""
    if not isinstance(text, list):
        return str(text)
    key, *values = text
    return _filled(_page_texts(language or _spoken[0])[key], tuple(in_words(value, language) for value in values))


@functools.cache
def _texts(name: str) -> dict[str, str]:
    return json.loads((FOLDER / name / "report.json").read_text(encoding="utf-8"))


@functools.cache
def _page_texts(name: str) -> dict[str, str]:
    return json.loads((FOLDER / name / "main.json").read_text(encoding="utf-8"))["torchCompileKit"]
