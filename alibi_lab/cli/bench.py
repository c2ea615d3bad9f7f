"""`alibi bench`: one command per entry of `measure/benchmarks.py`. Each command writes records.

A command's help is the first sentence of its module. Its options are arguments of its function, with the help that the
function's docstring has under "Args:". Both are read from the source, so `--help` loads no framework and needs no extra.
"""

import ast
import importlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from alibi_attn.cli.console import check_writable, needs
from alibi_lab.cli.options import argument_help
from alibi_lab.measure.benchmarks import BENCHMARKS, Benchmark

Out = Annotated[Path, typer.Option(help="Folder for the records.")]


def whole_numbers(text: str, name: str) -> tuple[int, ...]:
    """Parses positive integers separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name} is {text!r} but must be whole numbers separated by commas, as in 1024,8192")
    return tuple(map(int, parts))


def names(text: str, name: str) -> list[str]:
    """Parses names separated by commas."""
    return text.split(",")


def shapes(text: str, name: str) -> list[tuple[int, int]]:
    """Parses pairs (number of heads, head size), as in 16x128,32x64."""
    pairs = [part.strip().partition("x")[::2] for part in text.split(",")]
    for part, pair in zip(text.split(","), pairs, strict=True):
        if not all(number.isdecimal() and int(number) > 0 for number in pair):
            raise ValueError(f"{name} has {part!r} but must be NUMBERxSIZE of heads, as in 16x128")
    return [(int(count), int(size)) for count, size in pairs]


# How an option is read into an argument, by the argument's annotation. Arguments of other types have no option.
PARSERS = {
    "Sequence[int]": whole_numbers,
    "Sequence[str]": names,
    "Sequence[tuple[int, int]]": shapes,
}
TYPES: Mapping[str, Any] = {
    **dict.fromkeys(PARSERS, str),
    **{kind.__name__: kind for kind in (int, float, bool, str, Path)},
    "Path | None": Path | None,
    "Sequence[Path]": list[Path] | None,
}


def commands(benchmarks: Mapping[str, Benchmark]) -> typer.Typer:
    """The group `alibi bench`, with one command per benchmark of the table."""

    class Group(TyperGroup):
        """Reads the sources of benchmarks when they are needed: other commands start without them."""

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in benchmarks:
                return None
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(_command(cmd_name, benchmarks[cmd_name]))
            return get_command(alone)

    group = typer.Typer(
        cls=Group,
        help="Measure on this machine. Each benchmark checks its peers first, times them, and writes records for `alibi report`.",
        no_args_is_help=True,
    )
    for name in benchmarks:
        group.command(name)(lambda: None)  # replaced by `Group.get_command`
    return group


def _command(name: str, benchmark: Benchmark) -> Callable[..., None]:
    """The command of a benchmark. Typer reads its options from the signature that is set here."""
    place = benchmark.function or f"alibi_lab.measure.{name}:{name}".replace("-", "_")
    module, _, function = place.partition(":")
    source = _source(module)
    purpose = (ast.get_docstring(source) or "").partition("\n\n")[0].partition(": ")[2]
    kinds, options = dict[str, str](), [_parameter("out", Out, Path("results"))]
    for argument, kind, default, text in _documented(source, function):
        kinds[argument] = kind
        least = benchmark.least.get(argument, 0 if default == 0 else 1) if kind == "int" else None
        options.append(_parameter(argument, Annotated[TYPES[kind], typer.Option(help=text, min=least)], default))

    def command(out: Path, **values: Any) -> None:
        with needs(benchmark.extra):
            measure = getattr(importlib.import_module(module), function)
        check_writable(out / "record.json")
        given = {name: value for name, value in values.items() if value not in ("", None)}
        parsed = {name: PARSERS[kinds[name]](text, name) for name, text in given.items() if kinds[name] in PARSERS}
        for path in measure(out, **given | parsed, say=typer.echo):
            typer.echo(f"record {path}")

    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    command.__doc__ = f"{_sentence(purpose)}\n\nExample: alibi bench {name} {benchmark.example}"
    return command


def _parameter(name: str, annotation: object, default: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _source(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _documented(source: ast.Module, name: str) -> Iterator[tuple[str, str, object, str]]:
    """(name, annotation, default, help) of the arguments of a function that are documented and can be options."""
    (function,) = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == name)
    texts = argument_help(ast.get_docstring(function) or "")
    for each, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        argument, _, kind = ast.unparse(each).partition(": ")
        if argument in texts and kind in TYPES:
            yield argument, kind, _literal(default), _sentence(texts[argument])


def _sentence(text: str) -> str:
    """The text in one line that begins with a capital."""
    line = " ".join(text.split())
    return line[:1].upper() + line[1:]


def _literal(default: ast.expr | None) -> object:
    """The value of a default; None if it is a name, so that the function's own default applies."""
    match default:
        case ast.Constant(value) | ast.Call(args=[ast.Constant(value)]):  # the latter is Path("runs")
            return value
    return None


app = commands(BENCHMARKS)
