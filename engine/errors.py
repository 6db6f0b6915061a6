"""Errors that users read: each names what was given and how to cure it."""


class TorchCompileKitError(RuntimeError):
    """Base of the errors this pack raises on purpose."""


class InvalidSetting(TorchCompileKitError, ValueError):
    """A node input has a value that cannot work.

    Args:
        name: the input as the node shows it.
        value: what was given.
        cure: one sentence that says what to set instead.
    """

    def __init__(self, name: str, value: object, cure: str):
        super().__init__(f"{name} = {value!r}: {cure}")
        self.name = name
        self.value = value


class BlockCompileError(TorchCompileKitError):
    """A block could not be compiled and `on_failure` is `stop`."""
