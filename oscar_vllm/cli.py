"""The ``oscar`` command: each subcommand lives in a module of ``oscar_vllm.commands``."""

import typer

from oscar_vllm.commands.bench import bench
from oscar_vllm.commands.calibrate import calibrate
from oscar_vllm.commands.demo import demo
from oscar_vllm.commands.doctor import doctor
from oscar_vllm.commands.evaluate import evaluate
from oscar_vllm.commands.import_recipe import import_recipe
from oscar_vllm.commands.inspect import inspect

app = typer.Typer(no_args_is_help=True, add_completion=False, help="OSCAR: a 2-bit KV cache for stock vLLM.")
app.command()(calibrate)
app.command()(demo)
app.command()(doctor)
app.command("eval")(evaluate)
app.command("import")(import_recipe)
app.command()(inspect)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
