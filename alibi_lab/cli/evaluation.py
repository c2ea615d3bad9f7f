"""`alibi eval`: test a trained model on a text."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alibi_attn.cli.console import check_writable, errors, needs, print_path
from alibi_lab import records
from alibi_lab.cli import checkpoints
from alibi_lab.cli.perplexities import print_curves, print_perplexities
from alibi_lab.cli.texts import TextField, joined
from alibi_lab.lab.config import ConfigError, EvalConfig, RunConfig
from alibi_lab.lab.config_io import override, to_json

if TYPE_CHECKING:
    from torch import Tensor

    from alibi_lab.lab.data.corpus import Corpus
    from alibi_lab.lab.model.language_model import LanguageModel


def evaluation(
    checkpoint: checkpoints.Checkpoint,
    text: Annotated[list[Path], typer.Option("--text", help="A text file or folder; can be repeated.")],
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens, in ascending order.")
    ] = "128,256,512,1024,2048",
    tokens: Annotated[int, typer.Option(help="Tokens to score.")] = EvalConfig.tokens,
    stride: Annotated[
        int | None, typer.Option(help="Stride of the sliding window.", show_default="a quarter of each length")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(help="Also read in segments, with this many cached tokens before each segment.", min=0),
    ] = None,
    text_field: TextField = "",
    sinks: Annotated[
        int | None,
        typer.Option(help="Also read with this many attention sinks plus a window; each length counts both.", min=0),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="FILE.py:CLASS",
            help="Code of the model's position method, or of additional tests; repeatable.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the record, which alibi report can draw.")] = None,
) -> None:
    """Test a trained model on a text at several lengths: perplexity on nonoverlapping segments and with a sliding window.

    [dim]alibi eval runs/quick/checkpoints/quick/alibi-128/seed-0-… --text novel.txt --lengths 128,1024[/]

    Two more ways read a continuous stream: cached segments (Transformer-XL), and attention sinks with a window (StreamingLLM).

    [dim]alibi eval CHECKPOINT --text novel.txt --lengths 128,256 --memory 128 --sinks 4[/]

    A position method that is not built in needs its code; a class with a hook "curves" adds a test to any model.

    [dim]alibi eval runs/mine --text novel.txt --method mine.py:MyBias[/]
    """
    with needs("lab"):
        from alibi_lab.lab.data.corpus import whole_text
        from alibi_lab.lab.evaluation.long_context_eval import why_no_memory, why_no_sinks
        from alibi_lab.lab.training.checkpoint import load_checkpoint_tokenizer
    if out is not None:
        check_writable(out / "record")
    checkpoint = checkpoints.find(checkpoint)
    own, others = _methods(checkpoint, methods or ())
    model, trained = checkpoints.load(checkpoint, own)
    for value, reason in ((memory, why_no_memory(model)), (sinks, why_no_sinks(model))):
        if value is not None and reason:
            raise typer.BadParameter(reason)
    changes = {
        "data.corpus": "text",
        "data.text": joined(text),
        "data.text_field": text_field,
        "eval.lengths": lengths,
        "eval.tokens": str(tokens),
        "eval.stride": str(stride),
        "eval.memory": "" if memory is None else str(memory),
        "eval.sinks": "" if sinks is None else str(sinks),
    }
    try:
        config = override(trained, changes)
    except ConfigError as error:
        raise typer.BadParameter(checkpoints.with_options(str(error))) from None
    corpus, longest = whole_text(text, load_checkpoint_tokenizer(checkpoint), text_field), config.eval.lengths[-1]
    if len(corpus.valid) < 2 * longest:
        raise ValueError(
            f"--text has {len(corpus.valid)} tokens but --lengths up to {longest} need {2 * longest}: {longest} to score and as "
            "many before them; pass more text or shorter --lengths"
        )
    record = _tested(model, config, corpus, others, lambda: _training_text(trained, checkpoint))
    print_perplexities([record])
    if out is not None:
        print_path("record", records.save(record, out))


def _methods(checkpoint: Path, methods: Sequence[str]) -> tuple[str | None, list[str]]:
    """The code of the model's position method, if it was passed, and of the additional tests."""
    from alibi_lab.lab.model.imported_method import imported_method
    from alibi_lab.lab.training.checkpoint import checkpoint_method

    trained = checkpoint_method(checkpoint)
    own = next((one for one in methods if one.rpartition(":")[2] == trained.rpartition(":")[2]), None)
    others = [one for one in methods if one != own]
    if missing := [kind.__name__ for kind in map(imported_method, others) if "curves" not in vars(kind)]:
        raise typer.BadParameter(
            f"{checkpoint} was trained with {trained}; --method {', '.join(missing)} neither is its class nor has a test (curves)"
        )
    return own, others


def _training_text(trained: RunConfig, checkpoint: Path) -> "Tensor":
    from alibi_lab.lab.data.corpus import load_corpus
    from alibi_lab.lab.training.checkpoint import stored_tokens

    return load_corpus(trained.data, stored_tokens(checkpoint)).train


def _tested(
    model: "LanguageModel",
    config: RunConfig,
    corpus: "Corpus",
    others: Sequence[str],
    training_text: Callable[[], "Tensor"],
) -> records.Record:
    """The record of all tests; only the tests of methods need the training text."""
    from alibi_lab.lab.evaluation.long_context_eval import all_curves, own_curves
    from alibi_lab.lab.model.imported_method import imported_method, source_facts
    from alibi_lab.lab.run import run_name

    with errors.status("testing"):
        curves = all_curves(model, corpus, config.eval, say=errors.print)
    for test in (type(model.position), *map(imported_method, others)):
        if "curves" in vars(test):
            found = own_curves(test, model, dataclasses.replace(corpus, train=training_text()), config.eval)
            print_curves(found)
            curves |= found
    about: dict[str, records.Json] = {**to_json(config), "corpus": corpus.facts}
    if facts := source_facts(config.model.method):
        about["method"] = facts
    if others:
        about["tests"] = [source_facts(one) for one in others]
    metrics = {"parameters": model.num_parameters()}
    name = run_name("eval", config.model.method, config.train.length, config.train.seed)
    return records.make("evaluation", name, config=about, metrics=metrics, curves=curves)
