"""Where this project keeps files on the user's machine."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$OSCAR_CACHE`` if set, else ``~/.cache/oscar_vllm``. Not created here."""
    configured = os.environ.get("OSCAR_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "oscar_vllm"
