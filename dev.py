#!/usr/bin/env python3
"""Run a developer's command: `python dev.py demo`, `python dev.py test`. Sets up what the command needs; see --help."""

import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))

# No f-string: an old Python must be able to parse this file and print the message.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(
        "dev.py needs Python 3.10 or newer, as ComfyUI does; this is Python %s (%s). Run it with a newer one, "  # noqa: UP031
        "for example: python3.12 dev.py test" % (sys.version.split()[0], sys.executable)
    )


def load_devtools():
    """Import devtools/ by its path: with this folder on sys.path, `import nodes` would import nodes/ of this pack."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.getcwd()) != ROOT]
    folder = os.path.join(ROOT, "devtools")
    spec = importlib.util.spec_from_file_location(
        "devtools", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    sys.modules["devtools"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    load_devtools()
    from devtools.cli import main

    sys.exit(main(sys.argv[1:]))
