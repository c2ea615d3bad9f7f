"""A trained model on the command line: its arguments, `alibi generate`, `alibi export` and `alibi eval`."""

import codecs
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from alibi_attn.cli.console import check_writable, errors, needs, print_path
from alibi_lab import records
from alibi_lab.cli.options import TextField, documented, joined, usage_errors
from alibi_lab.cli.report import print_curves, print_perplexities
from alibi_lab.lab.config import EvalConfig, nearest
from alibi_lab.lab.config_io import override, to_json

Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or a run's folder; RUN:alibi picks one of its models.", show_default=False)
]
Method = Annotated[
    str | None,
    typer.Option(help="Code of a position method that is not built in, FILE.py:Class. It is never imported otherwise."),
]


def find(path: Path) -> Path:
    """The folder of a trained model: the given one, or the model of a run's folder.

    Raises:
        ValueError: the run has no such model, or several; lists them.
    """
    run, colon, name = str(path).rpartition(":")
    folder, name = (Path(run), name) if colon and not path.exists() else (path, "")
    if not (folder / "checkpoints").is_dir():
        return path
    root = folder / "checkpoints"
    models = sorted({step.parent.parent for step in root.glob("**/step-*/config.json")})
    found = [model for model in models if not name or name in _names(model)]
    if len(found) == 1:
        return found[0]
    choices = "; ".join(f"{folder}:{'/'.join(model.parts[-2:]).rpartition('-')[0]}" for model in found or models)
    known = tuple(dict.fromkeys(one for model in models for one in _names(model)))
    guess = nearest(name, known) if name and not found else ""
    raise ValueError(
        f"{path} has {len(found) or 'no'} such models{guess}; pass one of: {choices}"
        if models
        else f"{folder} has no models yet"
    )


def validation_text(path: Path, method: str | None) -> str:
    """The start of a checkpoint's validation text; `method` is the code of its position method."""
    with needs("lab"):
        from alibi_lab.lab.data.corpus import load_corpus
        from alibi_lab.lab.training.checkpoint import load_checkpoint, stored_tokens
    corpus = load_corpus(load_checkpoint(path, method=method)[1].data, stored_tokens(path))
    return corpus.tokenizer.decode(corpus.valid[: 1 << 16]).decode(errors="ignore")


@documented
def generate(
    checkpoint: Checkpoint,
    prompt: str,
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: Annotated[int | None, typer.Option(show_default="all")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    method: Method = None,
) -> None:
    """Continue a text with a trained model, token by token with a KV cache.

    [dim]alibi generate runs/quick/checkpoints/quick/alibi-128/seed-0-… --prompt "def main" --max-new-tokens 500[/]

    Args:
        prompt: Text to continue.
        max_new_tokens: Number of tokens to add, even beyond the trained length.
        temperature: 0 always takes the most likely token; 1 samples from the model's distribution.
        top_k: Sample only from this many most likely tokens.
        seed: Seed of the sampling.
    """
    with needs("lab"):
        from alibi_lab.lab.model import generation
        from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer
    checkpoint = find(checkpoint)
    model, _ = load_checkpoint(checkpoint, method=method)
    tokenizer = load_checkpoint_tokenizer(checkpoint)
    ids = tokenizer.encode(prompt).tolist()
    stream = generation.generate(
        model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(prompt, end="", flush=True)
    printed = len(tokenizer.decode(ids))
    for token in stream:
        ids.append(token)
        text = tokenizer.decode(ids)
        print(decoder.decode(text[printed:]), end="", flush=True)
        printed = len(text)
    print(decoder.decode(b"", final=True))


@documented
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(show_default=False)],
    family: Literal["mpt"] = "mpt",
) -> None:
    """Write a trained model as a checkpoint that AutoModelForCausalLM loads with equal logits, tokenizer included.

    The model must be trained with [bold]model.architecture=mpt[/] and ALiBi. No transformers family has the norm and
    feed-forward of the default architecture, "modern".

    [dim]alibi run quick --set model.architecture=mpt --out runs/mpt[/]

    [dim]alibi export runs/mpt/checkpoints/quick/alibi-128/seed-0-… my-mpt[/]

    Args:
        out: New folder to write.
        family: Model family to export to.
    """
    with needs("hf,lab"):
        from alibi_attn.hf.readers.export import DecoderConfig, export_mpt
        from alibi_attn.inspect import saved_tokenizer
        from alibi_lab.lab.model.language_model import decoder_state
        from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer
    checkpoint = find(checkpoint)
    model, config = load_checkpoint(checkpoint)
    about = DecoderConfig(num_heads=config.model.num_heads, trained_length=config.train.length)
    tokenizer = saved_tokenizer(load_checkpoint_tokenizer(checkpoint).dump())
    path = export_mpt(decoder_state(model), about, out, tokenizer=tokenizer)
    typer.echo(f"{family}  {path}")


@documented
def evaluation(
    checkpoint: Checkpoint,
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
    record = _tested(find(checkpoint), methods or (), text, changes)
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
        from alibi_lab.lab.training import checkpoint as stored
    trained_with = stored.checkpoint_method(checkpoint)
    own = next((one for one in methods if one.rpartition(":")[2] == trained_with.rpartition(":")[2]), None)
    others = [one for one in methods if one != own]  # additional tests
    if missing := [kind.__name__ for kind in map(imported_method, others) if "curves" not in vars(kind)]:
        names = ", ".join(missing)
        raise typer.BadParameter(
            f"{checkpoint} was trained with {trained_with}; --method {names} neither is its class nor has a test (curves)"
        )
    model, trained = stored.load_checkpoint(checkpoint, method=own)
    for field, reason in (("eval.memory", tests.why_no_memory(model)), ("eval.sinks", tests.why_no_sinks(model))):
        if changes[field] and reason:
            raise typer.BadParameter(reason)
    with usage_errors(_with_options):
        config = override(trained, changes)
    tokenizer, longest = stored.load_checkpoint_tokenizer(checkpoint), config.eval.lengths[-1]
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
        corpus = dataclasses.replace(corpus, train=load_corpus(trained.data, stored.stored_tokens(checkpoint)).train)
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


def _with_options(message: str) -> str:
    """The error of a config for `alibi eval`, which has options instead of fields.

    >>> _with_options("eval.lengths is 'a' but must be a whole number")
    "--lengths is 'a' but must be a whole number"
    """
    return re.sub(r"\b(?:data|eval)\.(\w+)", lambda field: f"--{field[1].replace('_', '-')}", message)


def _names(model: Path) -> tuple[str, str, str]:
    """The names that select a model: "alibi", "alibi-128" and "alibi-128/seed-0"."""
    method, seed = model.parts[-2], model.name.rpartition("-")[0]
    return method.rpartition("-")[0], method, f"{method}/{seed}"
