"""`alibi bench`: one command per entry of `measure/benchmarks.py`. Each command writes records."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from alibi_attn.cli.console import check_writable, needs, renamed
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
        arguments = {option.name: _value(option, values) for option in benchmark.options}
        given = {option: value for option, value in arguments.items() if value not in ("", None)}
        for path in measure(out, **given, say=typer.echo):
            typer.echo(f"record {path}")

    parameters = [parameter for option in benchmark.options for parameter in _parameters(option)]
    whole = [_parameter("out", Out, Path("results")), *parameters]
    command.__signature__ = inspect.Signature(whole)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in whole}
    command.__doc__ = f"{benchmark.help}\n\nExample: {benchmark.example}"
    return command


def _value(option: Option, values: Mapping[str, Any]) -> object:
    value = values[option.name]
    if option.old and values[option.old]:
        new = f"--{option.name} {option.old_flag}".strip()
        value = renamed(f"--{option.old}", new, option.old_flag or values[option.old], value)
    return value if option.read is None or not value else option.read(value, option.name)


def _parameters(option: Option) -> list[inspect.Parameter]:
    """The option, followed by its hidden old spelling if it has one."""
    # The class of Path("x") is PosixPath, which Typer 0.26 does not support.
    kind: Any = option.type or (Path if isinstance(option.default, Path) else type(option.default))
    limits: dict[str, Any] = dict(option.limits)
    parameters = [_parameter(option.name, Annotated[kind, typer.Option(help=option.help, **limits)], option.default)]
    if option.old:
        old_kind: Any = bool if option.old_flag else kind
        hidden = typer.Option(f"--{option.old}" + f"/--no-{option.old}" * bool(option.old_flag), hidden=True)
        parameters.append(_parameter(option.old, Annotated[old_kind | None, hidden], None))
    return parameters


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


app = commands(BENCHMARKS)
