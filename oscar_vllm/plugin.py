"""The ``vllm.general_plugins`` entry point: registration and nothing else.

vLLM calls :func:`register` in every process, before it reads the command line.
"""

import logging
import os
from typing import Any

from oscar_vllm.backend.platform import BACKEND, BACKEND_PATH, prepare_platform

SUPPORTED_VLLM = ("0.32", "0.33")
OVERRIDE = "OSCAR_ALLOW_ANY_VLLM"

logger = logging.getLogger("vllm.oscar")


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM whose internals this plugin was not verified with.

    Raises:
        RuntimeError: unsupported version, unless the environment variable OSCAR_ALLOW_ANY_VLLM is 1.
    """
    if ".".join(version.split(".")[:2]) in SUPPORTED_VLLM:
        return
    supported = " and ".join(f"{v}.*" for v in SUPPORTED_VLLM)
    if os.environ.get(OVERRIDE) == "1":
        logger.warning("oscar_vllm supports vLLM %s and runs with %s because %s=1", supported, version, OVERRIDE)
        return
    raise RuntimeError(
        f"oscar_vllm supports vLLM {supported} and found {version}: install a supported vLLM, uninstall oscar-vllm, or "
        f"set {OVERRIDE}=1 to try it as it is"
    )


def _backend_member() -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[BACKEND]


def _reduce(protocol: int) -> tuple[Any, tuple[()]]:
    return _backend_member, ()


def register() -> None:
    """Make ``--attention-backend OSCAR`` known to this process; calling it again changes nothing."""
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    check_vllm_version(vllm.__version__)
    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, BACKEND_PATH)
        # A spawned engine unpickles its configuration before it loads plugins: the member brings its registration.
        AttentionBackendEnum[BACKEND].__reduce_ex__ = _reduce
    prepare_platform()
