"""Kills `alibi run` and `alibi embed` with SIGKILL at random moments: random_kills.py WHAT FOLDER KILLS.

Each process is forked after all imports, so that kills hit the work itself. WHAT is `run` or `embed`, which are killed
once and then complete, or `resumed`, a run that is killed repeatedly until one attempt completes. Prints JSON: the
number of kills and of completed runs, and differences from the uninterrupted run.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo
from kills import end_of
from small_runs import smoke_run

from alibi_attn.hf.embedding import embedding, resumable_output, sentence_encoder  # noqa: F401 - loaded once
from alibi_lab.cli.main import app
from alibi_lab.lab import experiment  # noqa: F401
from alibi_lab.lab.training import train  # noqa: F401

WORDS = [letter * 3 for letter in "abcdefghijklmnop"]
TIMES = {"seconds", "tokens_per_second", "peak_memory_bytes"}


def main() -> None:
    what, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    resumable_output.KEEP_SECONDS = 0.01
    text = folder / "text.txt"
    text.write_text(" ".join(random.Random(1).choices(WORDS, k=6000)))
    arguments = embed(folder) if what == "embed" else run(text)
    found = embedded if what == "embed" else recorded
    began = time.monotonic()
    assert end_of(lambda: command(arguments(folder / "uncut" / "out"))) == 0
    seconds = time.monotonic() - began
    expected = found(folder / "uncut")
    generator, killed, ended, different = random.Random(what), 0, 0, []
    while killed < kills or ended == 0:
        place = folder / "cut"
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            again = killed < kills and (what == "resumed" or not place.exists())
            limit = generator.uniform(0.0, 0.7 * seconds if what == "resumed" else seconds) if again else None
            complete = (place / "out").is_file()  # `embed` was killed after its work: now it refuses to overwrite
            code = end_of(lambda: command(arguments(folder / "cut" / "out")), seconds=limit)
            killed += code == -signal.SIGKILL
        ended += 1
        ours = found(place)
        if (code != 0 and not complete) or ours != expected:
            names = [name for name in {**expected, **ours} if expected.get(name, "none") != ours.get(name, "none")]
            different.append({"code": code, "kills": killed, "names": names})
        shutil.rmtree(place)
    print(json.dumps({"kills": killed, "ended": ended, "different": different, "seconds": seconds}))


def run(text: Path) -> Callable[[Path], list[str]]:
    fields = {"model.dropout": "0.1", "train.steps": "60", "train.checkpoint_every": "2", "train.validate_every": "20"}
    return lambda out: smoke_run(out, fields, "--text", str(text))


def embed(folder: Path) -> Callable[[Path], list[str]]:
    from encoder_oracle import config, random_state, write_folder, write_tokenizer

    model = write_tokenizer(write_folder(folder / "jina", random_state("jina"), config("jina")))
    drawn, lines = random.Random(2), folder / "lines.txt"
    lines.write_text(
        "\n".join(" ".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(1, 40))) for _ in range(1500))
    )
    options = ["--lines", "--batch-tokens", "200"]
    return lambda out: ["embed", str(model), str(lines), *options, "--out", str(out)]


def recorded(folder: Path) -> dict:
    """Everything that a run writes except times, locks and dead processes' temporary files."""
    found: dict = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or path.name.startswith(".lock") or path.suffix == ".tmp":
            continue
        if path.parent.name == "records":
            record = json.loads(path.read_text())
            found[name] = without_times({key: record[key] for key in ("config", "curves", "metrics")})
        elif path.suffix in (".safetensors", ".bin"):
            found[name] = path.read_bytes()
        else:
            found[name] = None  # a file that is there
    return found


def embedded(folder: Path) -> dict:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def without_times(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_times(x) for key, x in value.items() if key not in TIMES}
    return value


def command(arguments: list[str]) -> None:
    with (
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        app(arguments, standalone_mode=False)


if __name__ == "__main__":
    main()
