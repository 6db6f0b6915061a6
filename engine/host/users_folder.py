"""Where the host's user keeps compiled code and cache files."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ..disk_cache import DiskCache, open_cache


def kit_folder() -> Path:
    """The pack's folder in the user's: cache files lie in it, the cache itself in `cache`."""
    return Path(folder_paths.get_user_directory()) / "torch-compile-kit"


def open_users_cache() -> DiskCache | None:
    """The cache of this user; see `disk_cache.open_cache`."""
    return open_cache(kit_folder() / "cache")
