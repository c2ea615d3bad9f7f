"""`make gpu`: its parts, what it leaves, and a rehearsal in Triton's interpreter."""

import dataclasses
import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import everything_on_device as command
import pytest
import torch
from everything_on_device import PARTS, Part, chosen, everything
from programs import printed

from alibi_attn.nn.linear import quantized
from alibi_lab import records
from alibi_lab.measure.inputs import Case, draw

attention, decoding, models = (
    importlib.import_module(f"alibi_lab.measure.{x}") for x in ("attention", "decoding", "models")
)

# What a machine with a GPU may not have.
ABSENT = ("hypothesis", "matplotlib", "pytest", "rich", "safetensors", "scipy", "transformers", "typer")


def says(code: str, seconds: float = 60) -> Part:
    return Part(("-c", code), seconds)


def test_a_part_that_did_not_pass_is_repeated_and_the_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = says("import pathlib, sys; pathlib.Path(sys.argv[1], 'record').touch(); print('right')")
    wrong = says("print('WRONG bfloat16'); raise SystemExit(3)")
    assert everything(tmp_path, {"conformance": right, "attack": wrong, "bench": right}) == 1
    assert "attack failed with exit status 3, " in (said := capsys.readouterr().out)
    assert "    WRONG bfloat16\n" in said
    assert everything(tmp_path, {"conformance": wrong, "attack": right, "bench": wrong}) == 0
    assert capsys.readouterr().out.count("has passed already") == 2
    assert sorted(x.name for x in tmp_path.iterdir()) == ["attack-1", "attack-2", "bench-1", "conformance-1"]
    assert (tmp_path / "attack-2" / "record").exists()


def test_a_part_that_takes_too_long_is_stopped_with_its_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"import sys, subprocess; child = {sleeper}; print(child.pid); child.wait()"
    assert everything(tmp_path, {"attack": says(code, 5)}) == 1
    assert "attack was stopped after 5 s" in capsys.readouterr().out
    assert not (tmp_path / "attack-1" / "passed").exists()
    pid = int((tmp_path / "attack-1" / "log.txt").read_text(encoding="utf-8"))
    while (state := Path(f"/proc/{pid}/stat")).exists() and state.read_text().split()[2] != "Z":
        pass  # killed, but not yet gone


def test_the_parts_end_within_eight_minutes_with_conformance_first() -> None:
    assert sum(part.seconds for part in PARTS["full"].values()) <= 480
    assert list(PARTS["full"]) == [
        "conformance", "compile", "attention", "decoding", "models", "jax", "context", "attack"
    ]  # fmt: skip
    assert list(PARTS["smoke"]) == [
        name for name in PARTS["full"] if name != "compile"
    ]  # an interpreter compiles nothing


@pytest.mark.parametrize("what", command.CALLS)
def test_every_measurement_of_a_gpu_has_its_cases_and_peers(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the cases of every call are made, and their peers, from small inputs on the CPU."""
    configs, peers = list[str](), list[list[str]]()

    def keep(out: Path, named: dict[str, object], steps: object, **options: object) -> list[Path]:
        configs.extend(named)
        return []

    def table(cases: dict[str, list[Case]], of: Callable, budget: object, more: object = None) -> None:
        for case in (case for each in cases.values() for case in each):
            assert case.device.type == "cuda"
            small = draw(dataclasses.replace(case, length=70, batch=1, device=torch.device("cpu")))
            peers.append([peer.name for peer in of(case, small)])

    for module in (attention, decoding, models):
        monkeypatch.setattr(module, "keep", keep)
        monkeypatch.setattr(module, "table", table, raising=module is not models)
    monkeypatch.setattr(attention, "_compile_ahead", lambda cases, budget: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quantized, "check_supported", lambda kind, device: None)
    for _, options in command.CALLS[what]:
        command.benchmark(what)(tmp_path, **options, device="cuda")
    assert len(configs) >= len(command.CALLS[what])
    assert all("ours" in names and len(names) > 2 for names in peers)
    if what != "models":
        assert len(peers) == sum(len(options["lengths"]) for _, options in command.CALLS[what])


def test_some_parts_share_the_given_seconds() -> None:
    parts = chosen("full", ["models", "attention"], 85)
    assert {name: part.seconds for name, part in parts.items()} == {"attention": 55, "models": 30}
    assert parts["attention"].command()[-2:] == ["--seconds", "35"]
    assert chosen("full") == PARTS["full"]


def test_a_process_compiles_its_share_of_the_kernels() -> None:
    code = """
import json
from compile_ahead import compiled
from alibi_attn.attention.backends.fused import launch
asked = []
class Nothing:
    function = packed_metadata = None
    def __init__(self, source, **options):
        self.name = source.fn.__name__
        asked.append(self.name)
    def run(self, *arguments):
        pass
    def __getitem__(self, grid):
        return self.run
names = compiled(1, 3, most=2, own=Nothing)
print(json.dumps([names, asked, [key[0].__name__ for key in launch._COMPILED]]))
"""
    paths = os.pathsep.join([str(Path(command.__file__).parent), str(command.ROOT)])
    names, asked, kernels = json.loads(printed("-c", code, PYTHONPATH=paths))
    assert "forward_kernel" in kernels
    assert names == asked == kernels[1::3]


@pytest.mark.long
def test_a_rehearsal_passes_with_nothing_but_torch_and_triton(tmp_path: Path) -> None:
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is absent')\n", encoding="utf-8")
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    line = command.__file__, tmp_path / "out", "--scale", "smoke"
    said = printed(*line, timeout=1500, **environment)
    assert re.search(r"\b(\d+) of \1 cases are right, 0 left out", said), said
    assert "2 of 2 draws, broken: none" in said
    found = [record.name for record in records.find(tmp_path / "out")]
    assert sorted(found) == [
        "attention/cpu-float32-gates-4-U-8-2x16",
        "attention/cpu-float32-masked-2x16",
        "attention/cpu-float32-noise-2x16",
        "attention/jax-cpu-float32-noise-2x16",
        "context-parallel-cpu/gloo-2-on-1",
        "decoding/cpu-float32-2x16",
        "fused/interpreted",
        "fused/interpreted",
    ]
    assert printed(*line, timeout=1500, **environment).count("has passed already") == len(PARTS["smoke"])
