"""Encoders and quantized linear layers as `make gpu` measures them, at smoke scale on a CPU."""

from pathlib import Path

import pytest
import torch

from alibi_lab import records
from alibi_lab.measure import gpu_encoders, gpu_linears
from alibi_lab.measure.gpu_encoders import DOCUMENT, MIXED, TEXTS
from alibi_lab.measure.gpu_linears import LINEARS, LINEARS_COMPILED
from alibi_lab.measure.gpu_models import ENCODERS, gpu_models
from alibi_lab.measure.gpu_parts import Part

ABSENT = {"float8": "float8 needs an NVIDIA GPU of compute capability 8.9"} | (
    {} if torch.cpu._is_vnni_supported() else {"int8": "int8 needs an x86 processor with VNNI"}
)


def assert_right(part: Part, out: Path) -> None:
    (path,) = gpu_models(out, parts=[part.name], scale="smoke", say=lambda _: None)
    curves = records.load(path).curves
    assert set(curves) == set(part.peers)
    for peer, row in curves.items():
        if why := ABSENT.get(peer.split(",")[0]):
            assert row["why_not"][0].startswith(why)
            assert row["right"] == [None]
        else:
            assert row["right"] == [True]
            assert row["forward_ms"][0] > 0


@pytest.mark.parametrize("part", [LINEARS, MIXED, DOCUMENT], ids=lambda part: part.name)
def test_encoders_are_right(part: Part, tmp_path: Path) -> None:
    assert_right(part, tmp_path)


def test_a_document_that_dense_attention_cannot_read_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_encoders, "LONGEST_DENSE", 40)
    assert_right(DOCUMENT, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("part", [TEXTS, LINEARS_COMPILED], ids=lambda part: part.name)
def test_texts_and_compiled_layers_are_right(part: Part, tmp_path: Path) -> None:
    assert_right(part, tmp_path)


@pytest.mark.long
def test_texts_share_one_folder_until_the_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write = gpu_encoders.write_folder
    monkeypatch.setattr(
        gpu_encoders, "write_folder", lambda folder, *sizes: written.append(folder) or write(folder, *sizes)
    )
    assert_right(TEXTS, tmp_path)
    (folder,) = written
    assert not folder.exists()


def test_every_part_is_run_on_demand() -> None:
    assert {part.name for part in ENCODERS} == {x.name for x in (LINEARS, MIXED, DOCUMENT, TEXTS, LINEARS_COMPILED)}


@pytest.mark.skipif("int8" in ABSENT, reason="int8 needs a processor with VNNI instructions")
def test_another_largest_code_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_linears.LARGEST, "int8", 126.0)
    with pytest.raises(RuntimeError, match="linears, int8: at 30 tokens it is wrong"):
        gpu_models(tmp_path, parts=["linears"], scale="smoke", say=lambda _: None)
