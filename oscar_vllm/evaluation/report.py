"""Tables of an evaluation's figures."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_report(console: Console, figures: dict[str, Any]) -> None:
    """One table with a row for each method."""
    distribution = figures.get("distribution", {})
    setting = ""
    if distribution:
        positions = next((row["positions"] for row in distribution["rows"].values()), 0)
        setting = f": {positions:,} positions behind the first {distribution['skip']}"
    table = Table(
        title=f"{figures['model']}, {figures['device']}, vLLM {figures['vllm']}{setting}", title_justify="left"
    )
    columns = ["KV cache", "path", "bits"]
    columns += ["KL to BF16", "± s.e.", "top-1", "NLL"] if distribution else []
    columns += [name for key, name in (("needle", "needles"), ("humaneval", "HumanEval")) if key in figures]
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for row in table_rows(figures):
        table.add_row(*row)
    console.print(table)


def table_rows(figures: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, as text."""
    distribution = figures.get("distribution", {}).get("rows", {})
    rows = []
    for name, method in figures["methods"].items():
        cells = [method["title"], method["path"], f"{method['bits']:.2f}"]
        if distribution:
            cells += _quality(distribution.get(name), name, distribution)
        if "needle" in figures:
            found = figures["needle"].get(name)
            cells.append("" if found is None else f"{hits(found)} of {sum(cell['prompts'] for cell in found)}")
        if "humaneval" in figures:
            solved = figures["humaneval"].get(name)
            cells.append(
                "" if solved is None else f"{solved['passed']} of {solved['problems']} ({solved['pass_at_1']:.1%})"
            )
        rows.append(cells)
    return rows


def hits(cells: list[dict[str, Any]]) -> int:
    """Needles found over all lengths and depths."""
    return sum(cell["hits"] for cell in cells)


def _quality(row: dict[str, Any] | None, name: str, rows: dict[str, Any]) -> list[str]:
    if row is None:
        reference = next(iter(rows.values()), None)
        return ["0", "", "1.000", f"{reference['reference_nll']:.3f}"] if reference and name == "bf16" else [""] * 4
    return [f"{row['kl']:.4f}", f"{row['kl_error']:.4f}", f"{row['top1']:.3f}", f"{row['nll']:.3f}"]
