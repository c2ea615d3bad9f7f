"""Every example runs with small inputs, prints what it promises, and is short."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from encoder_oracle import config, random_state, write_folder, write_tokenizer
from programs import printed

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
Run = Callable[..., str]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path) -> Run:
    """run("train", "--steps", 2) -> what the example prints."""

    def example(name: str, *arguments: object) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES[0].parent / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return example


def numbers(pattern: str, printed: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(pattern, printed)]


def test_train(run):
    printed = run("train", "--steps", 12)
    losses = numbers(r"at once: ([\d.]+) nats", printed)
    assert len(losses) == 4
    assert max(losses) < 4.5  # of ln 256 = 5.5 without training, 64 times the trained length included
    assert max(losses) - min(losses) < 0.3


def test_cuda_graph(run):
    printed = run("cuda_graph")
    if not torch.cuda.is_available():
        assert printed == "skipped: a CUDA graph needs a CUDA device, and there is none\n"
        return
    assert numbers(r"to ([\d.]+)", printed) < numbers(r"from ([\d.]+)", printed)
    assert max(numbers(r"by (\S+)", printed)) < 1e-4


def test_hf_trainer(run):
    losses = numbers(r"at once: ([\d.]+) nats", run("hf_trainer", "--steps", 12))
    assert len(losses) == 2
    assert max(losses) < 4.5  # of ln 256 = 5.5 without training
    assert abs(losses[1] - losses[0]) < 0.3


def test_fine_tune_to_long(run):
    printed = run("fine_tune_to_long", "--steps", 3)
    trained, short, long, short_after, long_after = numbers(r"([\d.]+) at \d+", printed)
    assert max(trained, short, long) < 256  # of bytes drawn at random
    assert short_after < short
    assert long_after < long


def test_fill_in_the_middle(run):
    assert numbers(r"differ by (\S+) from", run("fill_in_the_middle", "--length", 700))[0] < 1e-5


def test_encoder_decoder(run):
    right = numbers(r"letters: ([\d.]+)% right", run("encoder_decoder", "--steps", 120, "--bias", "with"))
    assert len(right) == 3
    assert min(right) > 50  # of 4 % by chance, 4 times the trained length included


def test_patch_bloom(run):
    printed = run("patch_bloom", "--length", 300)
    assert "2 layers patched" in printed
    assert numbers(r"differ by (\S+) of", printed)[0] < 1e-4
    assert len(re.search(r"generated: \[(.*)\]", printed).group(1).split(",")) == 5


def test_long_document(run, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(Path(__file__).read_bytes()[:3000])
    printed = run("long_document", "--steps", 2, "--text", text)
    assert numbers(r"read ([\d,]+) tokens", printed)[0] == len(text.read_bytes()) - 1
    printed = run("long_document", "--text", text, "--again")
    assert "opened in another process" in printed
    assert (tmp_path / "document" / "cache" / "layer-001").is_file()


def test_forgetting_cache(run):
    printed = run("forgetting_cache", "--tokens", 4000)
    kept = re.findall(r"heads keep (.*);", printed)
    assert len(kept) == 4
    assert kept[1] == kept[2] == kept[3]
    assert numbers(r"differ by (\S+) at", printed)[-1] < 1e-4


def test_embed_documents_of_random_weights_and_of_a_checkpoint(run, tmp_path):
    printed = run("embed_documents")
    assert "5,230 tokens in a batch of 16,000" in printed
    assert numbers(r"alone differs by (\S+)", printed)[0] < 1e-4
    folder = write_tokenizer(write_folder(tmp_path / "jina", random_state("jina"), config("jina")))
    for name, text in (("a.txt", "a b c"), ("b.txt", "d e f g")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    rows = run("embed_documents", folder, "a.txt", "b.txt").splitlines()
    assert [row.split()[0] for row in rows[-2:]] == ["a.txt", "b.txt"]
    assert rows[-2].split()[1] == rows[-1].split()[2] == "1.00"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_passages(run, tmp_path):
    pytest.importorskip("lancedb", reason="the extra index is not installed")
    folder = write_tokenizer(write_folder(tmp_path / "jina", random_state("jina"), config("jina")))
    (tmp_path / "a.txt").write_text("a b c. d e f g! a b.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("h i j k l m n o", encoding="utf-8")
    lines = run("passages", folder, "h i j k l m n o", "a.txt", "b.txt", "--best", 2).splitlines()
    score, place, text = lines[0].split("  ")
    assert (place, text) == ("b.txt:0-15", "h i j k l m n o")
    assert float(score) > 0.99  # the query equals the passage's words; special tokens are averaged too
    assert len(lines) == 2
    lines = run("passages", folder, "a b.", "--best", 9).splitlines()  # everything is known
    assert sorted(line.split("  ")[1] for line in lines) == ["a.txt:0-6", "a.txt:16-20", "a.txt:7-15", "b.txt:0-15"]


def test_elapsed_time(run):
    printed = run("elapsed_time", "--events", 1024)
    assert numbers(r"differ by (\S+)", printed)[0] < 1e-4
    assert numbers(r"differs by (\S+)", printed)[0] > 0.1
    shares = numbers(r"([\d.]+)%", printed)
    assert shares[0] < shares[-1] <= 100
    assert "1,024 values between the events, finite: True" in printed


def test_forget_gates(run):
    printed = run("forget_gates", "--length", 1024)
    assert max(numbers(r"differ\w* .*by (\S+)", printed)) < 1e-4
    reaches = numbers(r"at most ([\d,]+) tokens", printed)
    assert reaches == sorted(reaches)
    assert len(reaches) == 3


def test_flax_training(run):
    pytest.importorskip("flax", reason="Flax is not installed")
    losses = numbers(r": ([\d.]+) nats", run("flax_training", 40))
    assert len(losses) == 2
    assert max(losses) < 2.5  # of ln 16 = 2.8


def test_flax_linen(run):
    pytest.importorskip("flax", reason="Flax is not installed")
    assert numbers(r"differ from one full pass by (\S+)", run("flax_linen"))[0] < 1e-5


@pytest.mark.long  # three processes that import everything; the other tests of context parallelism start some, too
def test_context_parallel():
    """Runs in a separate process, because it spawns two more that import it by its file name."""
    script = str(EXAMPLES[0].parent / "context_parallel.py")
    said = printed("-W", "error", script, "--length", "512")
    sent, everything = numbers(r"([\d,]+) rows", said)[:2]
    assert 0 < sent < everything / 2
    assert len(numbers(r"differ by (\S+) from", said)) == 2
    assert max(numbers(r"differ by (\S+) from", said)) < 1e-4


def test_five_demonstrations(run, tmp_path):
    printed = run("five_demonstrations", "--png", tmp_path / "heads.png")
    assert re.findall(r"^(\d)\.", printed, flags=re.MULTILINE) == ["1", "2", "2", "2", "3", "4", "5"]
    assert "[2, 10, 64] in, [2, 10, 64] out" in printed
    shares = numbers(r": ([\d.]+)% \(", printed)
    assert len(shares) == 3
    assert min(shares) > 50  # of 6 % by chance, eight times the trained length included
    assert numbers(r"by ([\d.e+-]+) at most", printed)[0] < 1e-4
    assert "16,384; of its four linear layers: 16,384" in printed
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_slide(run):
    printed = run("slide", "--patches", 300)
    assert "forward of 300 patches" in printed
    assert numbers(r"peak memory ([\d.]+)", printed)[0] > 0


def test_speech_encoder(run):
    printed = run("speech_encoder")
    assert "output [2, 1510, 64]" in printed
    assert all(numbers(r"(-?\d\.\de-\d\d)", printed))
    assert numbers(r"changes it by (\S+)", printed)[0] < 1e-5
