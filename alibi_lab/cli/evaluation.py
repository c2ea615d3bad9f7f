"""`alibi eval`: test a trained model on a text."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from alibi_attn.cli.console import check_writable, errors, needs, print_path
from alibi_lab import records
from alibi_lab.cli import checkpoints
from alibi_lab.cli.options import TextField, documented, joined, usage_errors
from alibi_lab.cli.report import print_curves, print_perplexities
from alibi_lab.lab.config import EvalConfig
from alibi_lab.lab.config_io import override, to_json


@documented
def evaluation(
    checkpoint: checkpoints.Checkpoint,
    text: list[Path],
    lengths: str = "128,256,512,1024,2048",
    tokens: int = EvalConfig.tokens,
    stride: Annotated[int | None, typer.Option(show_default="a quarter of each length")] = None,
    memory: Annotated[int | None, typer.Option(min=0)] = None,
    text_field: TextField = "",
    sinks: Annotated[int | None, typer.Option(min=0)] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", metavar="FILE.py:CLASS")] = None,
    out: Path | None = None,
) -> None:
    """Test a trained model on a text at several lengths: perplexity on nonoverlapping segments and with a sliding window.

    [dim]alibi eval runs/quick/checkpoints/quick/alibi-128/seed-0-… --text novel.txt --lengths 128,1024[/]

    Two more ways read a continuous stream: cached segments (Transformer-XL), and attention sinks with a window (StreamingLLM).

    [dim]alibi eval CHECKPOINT --text novel.txt --lengths 128,256 --memory 128 --sinks 4[/]

    A position method that is not built in needs its code; a class with a hook "curves" adds a test to any model.

    [dim]alibi eval runs/mine --text novel.txt --method mine.py:MyBias[/]

    Args:
        text: A text file or folder; can be repeated.
        lengths: Context lengths in tokens, in ascending order.
        tokens: Tokens to score.
        stride: Stride of the sliding window.
        memory: Also read in segments, with this many cached tokens before each segment.
        sinks: Also read with this many attention sinks plus a window; each length counts both.
        methods: Code of the model's position method, or of additional tests; repeatable.
        out: Folder for the record, which alibi report can draw.
    """
    if out is not None:
        check_writable(out / "record")
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
    record = _tested(checkpoints.find(checkpoint), methods or (), text, changes)
    print_perplexities([record])
    if out is not None:
        print_path("record", records.save(record, out))


def _tested(
    checkpoint: Path, methods: Sequence[str], text: Sequence[Path], changes: Mapping[str, str]
) -> records.Record:
    """The record of all tests of a model, with these changes of its config."""
    with needs("lab"):
        from alibi_lab.lab.data.corpus import load_corpus, whole_text
        from alibi_lab.lab.evaluation import evaluate as tests
        from alibi_lab.lab.model.method_checks import imported_method, source_facts
        from alibi_lab.lab.run import run_name
        from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer, stored_tokens
    own, others = _methods(checkpoint, methods)
    model, trained = load_checkpoint(checkpoint, method=own)
    for field, reason in (("eval.memory", tests.why_no_memory(model)), ("eval.sinks", tests.why_no_sinks(model))):
        if changes[field] and reason:
            raise typer.BadParameter(reason)
    with usage_errors(checkpoints.with_options):
        config = override(trained, changes)
    tokenizer, longest = load_checkpoint_tokenizer(checkpoint), config.eval.lengths[-1]
    corpus = whole_text(text, tokenizer, config.data.text_field)
    if len(corpus.valid) < 2 * longest:
        raise ValueError(
            f"--text has {len(corpus.valid)} tokens but --lengths up to {longest} need {2 * longest}: {longest} to score and as "
            "many before them; pass more text or shorter --lengths"
        )
    with errors.status("testing"):
        curves = tests.all_curves(model, corpus, config.eval, say=errors.print)
    about: dict[str, records.Json] = {**to_json(config), "corpus": corpus.facts}
    of_methods = [kind for kind in (type(model.position), *map(imported_method, others)) if "curves" in vars(kind)]
    if of_methods:  # only they need the training text
        corpus = dataclasses.replace(corpus, train=load_corpus(trained.data, stored_tokens(checkpoint)).train)
    for test in of_methods:
        found = tests.own_curves(test, model, corpus, config.eval)
        print_curves(found)
        curves |= found
    if facts := source_facts(config.model.method):
        about["method"] = facts
    if others:
        about["tests"] = [source_facts(one) for one in others]
    name = run_name("eval", config.model.method, config.train.length, config.train.seed)
    return records.make("evaluation", name, config=about, metrics={"parameters": model.num_parameters()}, curves=curves)


def _methods(checkpoint: Path, methods: Sequence[str]) -> tuple[str | None, list[str]]:
    """The code of the model's position method, if it was passed, and of the additional tests."""
    from alibi_lab.lab.model.method_checks import imported_method
    from alibi_lab.lab.training.checkpoint import checkpoint_method

    trained = checkpoint_method(checkpoint)
    own = next((one for one in methods if one.rpartition(":")[2] == trained.rpartition(":")[2]), None)
    others = [one for one in methods if one != own]
    if missing := [kind.__name__ for kind in map(imported_method, others) if "curves" not in vars(kind)]:
        raise typer.BadParameter(
            f"{checkpoint} was trained with {trained}; --method {', '.join(missing)} neither is its class nor has a test (curves)"
        )
    return own, others
