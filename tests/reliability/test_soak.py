"""One minute of the soak script; ten by hand: ``python ci/soak.py``."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "ci" / "soak.py"


def test_a_loaded_server_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "1", "--clients", "24", "--log", str(tmp_path / "log")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    log = (tmp_path / "log").read_text()[-3000:] if result.returncode else ""
    assert result.returncode == 0, result.stdout + result.stderr + log
