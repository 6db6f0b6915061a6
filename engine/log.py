"""Log under the name of the pack."""

import logging

logger = logging.getLogger("torch-compile-kit")
