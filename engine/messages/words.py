"""Say sentences in the user's language, from locales/LANGUAGE/report.json, or in English if the text is missing there.

The language is that of the prompt that runs, whoever has queued another meanwhile. Inside `speaking` the language is that of
the page whose request is answered.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "locales"
ENGLISH = "en"
_spoken: ContextVar[object] = ContextVar("language", default=None)
# Gives the language of the prompt that runs; nodes/routes.py sets this function.
language_of_prompt: Callable[[], object] = lambda: ENGLISH  # noqa: E731


@contextmanager
def speaking(language: object) -> Iterator[None]:
    """Use a language, a value of ComfyUI's setting `Comfy.Locale`, in this context and the threads of asyncio.to_thread."""
    token = _spoken.set(language or ENGLISH)
    try:
        yield
    finally:
        _spoken.reset(token)


def _language() -> str:
    language = _spoken.get() or language_of_prompt()
    return str(language) if language in LANGUAGES else ENGLISH


def say(key: str, *values: object) -> str:
    """A sentence, or a part of one, with `values` in the places of %1, %2."""
    return _filled(_texts(_language()).get(key) or _texts(ENGLISH)[key], values)


def say_in_english(key: str, *values: object) -> str:
    return _filled(_texts(ENGLISH)[key], values)


def _filled(text: str, values: tuple[object, ...]) -> str:
    return re.sub(r"%(\d)", lambda place: str(values[int(place[1]) - 1]), text)  # in one pass: values may contain %1


def counted(number: int, noun: str) -> str:
    """In English: `1 graph`, `2 graphs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def told(key: str, *values: object) -> list:
    """A text that the page translates: a key of `torchCompileKit` in locales/LANGUAGE/main.json, and values, which may be
    texts of `told` themselves, or lists of these (js/words.js)."""
    return [key, *values]


def in_words(text: object, language: str | None = None) -> str:
    """What the page shows for a text of `told`, in the user's language or in `language`."""
    if not isinstance(text, list):
        return str(text)
    key, *values = text
    return _filled(_page_texts(language or _language())[key], tuple(in_words(value, language) for value in values))


COMPILED_ELSEWHERE = told("leftAsIs", told("compiledElsewhere"))
NOT_CALLED = told("leftAsIs", told("notCalled"))


@functools.cache
def _texts(name: str) -> dict[str, str]:
    return json.loads((FOLDER / name / "report.json").read_text(encoding="utf-8"))


@functools.cache
def _page_texts(name: str) -> dict[str, str]:
    return json.loads((FOLDER / name / "main.json").read_text(encoding="utf-8"))["torchCompileKit"]


def _is_readable(name: str) -> bool:
    with suppress(OSError, ValueError, KeyError):
        return bool(_texts(name) and _page_texts(name))
    return False


# Read at import: an update of this pack may replace the files before ComfyUI is restarted.
LANGUAGES = tuple(filter(_is_readable, (folder.name for folder in FOLDER.iterdir())))
