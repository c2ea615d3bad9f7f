"""`alibi bench`: one command per entry of `measure/benchmarks.py`. Each command writes records."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from alibi_attn.cli.console import check_writable, needs
from alibi_lab.measure.benchmarks import BENCHMARKS, Benchmark, Option

Out = Annotated[Path, typer.Option(help="Folder for the records.")]


def commands(benchmarks: Mapping[str, Benchmark]) -> typer.Typer:
    """The group `alibi bench`, with one command per benchmark of the table."""
    group = typer.Typer(
        help="Measure on this machine. Each benchmark checks its peers first, times them, and writes records for `alibi report`.",
        no_args_is_help=True,
    )
    for name, benchmark in benchmarks.items():
        group.command(name)(_command(name, benchmark))
    return group


def _command(name: str, benchmark: Benchmark) -> Callable[..., None]:
    """The command of a benchmark. Typer reads its options from the signature that is set here."""

    def command(out: Path, **values: Any) -> None:
        place = benchmark.function or f"alibi_lab.measure.{name}:{name}".replace("-", "_")
        module, _, function = place.partition(":")
        with needs(benchmark.extra):
            measure = getattr(importlib.import_module(module), function)
        check_writable(out / "record.json")
        given = {
            option.name: option.read(value, option.name) if option.read else value
            for option in benchmark.options
            if (value := values[option.name]) not in ("", None)
        }
        for path in measure(out, **given, say=typer.echo):
            typer.echo(f"record {path}")

    whole = [_parameter("out", Out, Path("results")), *map(_option, benchmark.options)]
    command.__signature__ = inspect.Signature(whole)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in whole}
    command.__doc__ = f"{benchmark.help}\n\nExample: {benchmark.example}"
    return command


def _option(option: Option) -> inspect.Parameter:
    # The class of Path("x") is PosixPath, which Typer 0.26 does not support.
    kind: Any = option.type or (Path if isinstance(option.default, Path) else type(option.default))
    limits: dict[str, Any] = dict(option.limits)
    return _parameter(option.name, Annotated[kind, typer.Option(help=option.help, **limits)], option.default)


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


app = commands(BENCHMARKS)
