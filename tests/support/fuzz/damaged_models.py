"""Damages folders of models at random. A command must give a result, or end with one sentence that names the folder.

Commands run in this process, through the door of the command line. Only weights may change a result in silence: safetensors has
no checksum. Checkpoints of the lab are sealed, so their commands must give the same result or refuse.
"""

import contextlib
import io
import json
import random
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from commands import alibi
from damaged_json import VALUES, damage, places_in
from encoder_oracle import config, random_state, write_folder, write_tokenizer
from small_runs import smoke_run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from alibi_attn.cli import console
from alibi_lab.cli.main import app, error_in_method

TEXT = " ".join("abcdefghijklmnop"[at * at % 13] for at in range(60))
SECONDS = 60  # a command that takes longer hangs
SEALED = ("generate", "export")


class HangError(Exception):
    """A command took longer than `SECONDS`."""


def write_decoder(folder: Path, *, shards: bool = False) -> Path:
    """A BLOOM of random weights and a tokenizer of letters; with `shards`, its weights are in several files."""
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=40)).eval()
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    letters = Tokenizer(
        models.WordLevel({chr(97 + at) if at < 26 else f"w{at}": at for at in range(40)}, unk_token="a")
    )
    letters.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    return folder


def write_trained(folder: Path) -> Path:
    """The checkpoint of a lab model that was trained for two steps."""
    (folder / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    fields = {"train.steps": "2", "model.architecture": "mpt"}
    alibi(*smoke_run(folder / "run", fields, "--text", str(folder / "a.txt")))
    return next((folder / "run").glob("checkpoints/**/step-*"))


def model_of(command: str, folder: Path) -> Path:
    """A sound model for a command."""
    if command == "embed":
        return write_tokenizer(write_folder(folder / "model", random_state("jina"), config("jina")))
    return write_trained(folder) if command in SEALED else write_decoder(folder / "model", shards=command == "heads")


def arguments_of(command: str, model: Path, folder: Path) -> list[str]:
    """The command line."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    options = {
        "embed": [str(text), "--out", str(folder / "v.npy")],
        "eval-text": [str(text)],
        "heads": [str(text), "--length", "32"],
        "generate": ["--prompt", "to be", "--max-new-tokens", "4"],
        "export": [str(folder / "exported")],
    }
    return [*(["heads", "summary"] if command == "heads" else [command]), str(model), *options[command]]


def ended(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command. Raises what the command line would show as a traceback, or HangError."""
    out, error = io.StringIO(), io.StringIO()

    def late(*_: object) -> None:
        raise HangError(f"{arguments} takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            console.run(lambda: app(arguments), ("alibi_attn", "alibi_lab"), error_in_method)
    except SystemExit as end:
        return int(end.code or 0), out.getvalue(), error.getvalue()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return 0, out.getvalue(), error.getvalue()


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content with flipped bits, other values, other bytes, a missing end or more bytes; perhaps empty."""
    kind = rng.choice(["flip", "flip", "flips", "value", "value", "value", "cut", "empty", "more", "noise", "deep"])
    at = rng.randrange(max(1, len(content)))
    match kind:
        case "flip" | "flips":
            changed = bytearray(content)
            for _ in range(1 if kind == "flip" else 9):
                changed[rng.randrange(min(len(changed), rng.choice([64, 4096, 1 << 30])))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case "value":
            try:
                return with_other_value(json.loads(content), rng)
            except ValueError:  # safetensors
                return content[:8] + damaged(content[8:], rng)
        case "cut":
            return content[:at]
        case "empty":
            return b""
        case "more":
            return content + rng.randbytes(20)
        case "noise":
            return content[:at] + rng.randbytes(40) + content[at + 40 :]
    return b"[" * 100_000


def with_other_value(data: Any, rng: random.Random) -> bytes:
    """JSON with one damaged value."""
    place = rng.choice(list(places_in(data, most=12)))
    if not place:
        return json.dumps(rng.choice(VALUES)).encode()
    damage(data, place, rng)
    return json.dumps(data).encode()


class Attack:
    """One command, a sound model and its result."""

    def __init__(self, command: str, folder: Path) -> None:
        self.command, self.folder = command, folder
        self.model = model_of(command, folder)
        self.files = {path: path.read_bytes() for path in sorted(self.model.rglob("*")) if path.is_file()}
        self.arguments = arguments_of(command, self.model, folder)
        self.sound = self._result()
        assert self.sound[0] == 0, self.sound

    def draw(self, seed: int) -> str:
        """The outcome for one damaged file: "same", "other" or "refused"; raises AssertionError for any other."""
        rng = random.Random(seed)
        path = rng.choice(list(self.files))
        content = damaged(self.files[path], rng)
        self.restore()
        if rng.random() < 0.04:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(content)
        code, *_, error = result = self._result()
        if code == 0:
            kind = "same" if result[:-1] == self.sound[:-1] else "other"
            assert kind == "same" or self.command not in SEALED, f"{path.name} changed the result of {self.command}"
            return kind
        before, found, message = error.strip().rpartition("error: ")
        assert code == 1, f"{path.name}: exit code {code}: {error}"
        assert found, f"{path.name}: no sentence: {error}"
        assert "Traceback" not in before, f"{path.name}: {error}"
        assert "\n" not in message, f"{path.name}: more than one line: {error}"
        assert str(self.model) in message, f"{path.name}: names no path: {error}"
        return "refused"

    def restore(self) -> None:
        """Writes the sound model."""
        shutil.rmtree(self.model)
        for path, content in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _result(self) -> tuple[Any, ...]:
        """Exit code, output and what was written, and at last the errors; removes what was written."""
        code, out, error = ended(self.arguments)
        written = [
            path for path in sorted(self.folder.glob("*")) if path.name not in ("model", "run", "text.txt", "a.txt")
        ]
        contents = []
        for path in written:
            inside = sorted(path.rglob("*")) if path.is_dir() else [path]
            contents += [(one.name, one.read_bytes()) for one in inside if one.is_file()]
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert code == 0 or not written, f"{[path.name for path in written]} are left although {error[-300:]}"
        return code, out, contents, error
