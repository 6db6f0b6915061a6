"""Define the errors that users read: each names the value and the cure."""

# How many characters of a value a message shows.
SHOWN = 200


class TorchCompileKitError(RuntimeError):
    """Base of the errors this pack raises on purpose."""

    # ComfyUI shows an error's module, and the page knows our errors by it. The real one would be the path of the pack's folder.
    __module__ = "torch_compile_kit"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__module__ = TorchCompileKitError.__module__


class InvalidSetting(TorchCompileKitError, ValueError):
    """A node input has a value that cannot work; `cure` is one sentence that says what to set instead."""

    def __init__(self, name: str, value: object, cure: str):
        super().__init__(f"{name} = {shown(value)}: {cure}")
        self.name = name
        self.value = value if not isinstance(value, str) else value[:SHOWN]


class BlockCompileError(TorchCompileKitError):
    """A block could not be compiled and `on_failure` is `stop`."""


def shown(value: object) -> str:
    """Shorten a value for a message: an input of megabytes must not write megabytes of log."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN:  # Python refuses to print the longest numbers
        return "a number of very many digits"
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r}... ({len(value):,} characters)"
    text = " ".join(repr(value).split())  # a tensor's `repr` has many lines
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"
