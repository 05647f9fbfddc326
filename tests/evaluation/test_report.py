from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from oscar_vllm.evaluation.plots import draw
from oscar_vllm.evaluation.report import print_report, table_rows


@pytest.fixture
def figures() -> dict[str, Any]:
    def row(kl: float) -> dict[str, Any]:
        figures = {"positions": 8000, "kl": kl, "kl_error": kl / 50, "kl_p99": 9 * kl}
        return figures | {"top1": 0.94, "nll": 2.02, "reference_nll": 2.0}

    def cells(*hits: int) -> list[dict[str, Any]]:
        places = [(1024, 0.1), (1024, 0.9), (4096, 0.1), (4096, 0.9)]
        return [
            {"length": length, "depth": depth, "prompts": 2, "hits": hit, "tokens": length}
            for (length, depth), hit in zip(places, hits, strict=True)
        ]

    return {
        "model": "a model",
        "device": "CPU",
        "vllm": "0.32.0",
        "methods": {
            "bf16": {"title": "BF16 (stock backend)", "path": "served", "bits": 16.0},
            "kivi": {"title": "KIVI-like INT2", "path": "reference maths", "bits": 3.0},
            "ours": {"title": "oscar_vllm", "path": "served", "bits": 2.5},
        },
        "distribution": {
            "skip": 320,
            "chunk": 64,
            "texts": 4,
            "length": 2400,
            "rows": {"kivi": row(0.03), "ours": row(0.02)},
        },
        "needle": {"bf16": cells(2, 2, 2, 2), "ours": cells(2, 2, 1, 2)},
        "humaneval": {"ours": {"problems": 164, "passed": 82, "pass_at_1": 0.5}},
    }


def test_one_row_a_method(figures: dict[str, Any]) -> None:
    assert table_rows(figures) == [
        ["BF16 (stock backend)", "served", "16.00", "0", "", "1.000", "2.000", "8 of 8", ""],
        ["KIVI-like INT2", "reference maths", "3.00", "0.0300", "0.0006", "0.940", "2.020", "", ""],
        ["oscar_vllm", "served", "2.50", "0.0200", "0.0004", "0.940", "2.020", "7 of 8", "82 of 164 (50.0%)"],
    ]
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(console, figures)
    text = console.export_text()
    assert "8,000 positions behind the first 320" in text
    assert "HumanEval" in text


def test_columns_that_were_not_measured_are_left_out(figures: dict[str, Any]) -> None:
    del figures["needle"], figures["distribution"]
    assert [len(row) for row in table_rows(figures)] == [4, 4, 4]


def test_pictures(figures: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = draw(figures, tmp_path / "plots")
    assert [file.name for file in files] == ["kl.png", "needle.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    del figures["needle"]
    assert [file.name for file in draw(figures, tmp_path / "fewer")] == ["kl.png"]
