"""Files given as a path or as a place on the Hugging Face hub."""

import re
from pathlib import Path

HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?:(?P<file>[\w./ -]+)")


class HubError(ValueError):
    """A file that cannot be had from the hub; the message is one sentence."""


def download(repository: str, file: str, revision: str | None = None) -> Path:
    """The local copy of a file of a hub repository, downloaded unless it is there.

    Raises:
        HubError: no network, no such repository, revision or file.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, revision=revision or None))
    except Exception as error:  # the hub client raises many kinds; the sentence names the cause
        at = f"@{revision}" if revision else ""
        raise HubError(
            f"{file} of {repository}{at} cannot be had from the Hugging Face hub ({type(error).__name__}); check the "
            "network and the name, or download the file yourself and give its path."
        ) from None


def fetch(reference: str) -> Path:
    """A local path, or ``org/name[@revision]:file`` on the hub.

    Raises:
        HubError: neither a file here nor one that can be downloaded.
    """
    path = Path(reference).expanduser()
    if path.exists():
        return path
    match = HUB_FILE.fullmatch(reference)
    if match is None:
        raise HubError(f"{reference} is neither a file nor ORG/NAME[@REVISION]:FILE on the Hugging Face hub.")
    return download(match["repository"], match["file"], match["revision"])
