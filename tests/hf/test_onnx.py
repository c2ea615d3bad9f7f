"""An encoder as a dynamic torch.export program, and in ONNX Runtime, at lengths that were not exported."""

import importlib.util

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel
from alibi_attn.hf.readers.encoder.packing import Packing

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40, "vocab_size": 60}
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


def draw(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """ids and a mask with padding on the right, on the left and, in longer rows, a hole."""
    ids = torch.randint(60, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[1, length * 2 // 3 :] = 0
        mask[-1, : length // 4] = 0
        mask[0, length // 2 : length // 2 + length // 9] = 0
    return ids, mask


def test_the_first_token_of_exported_texts_depends_on_no_length_of_the_example():
    class First(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return Packing(*x.shape[:2], mask).first(x)

    sizes = {0: Dim("batch"), 1: Dim("length")}
    example = torch.randn(2, 11, 3), torch.ones(2, 11, dtype=torch.bool)
    program = export(First(), example, dynamic_shapes=(sizes, sizes)).module()
    x, mask = torch.randn(3, 70, 3), torch.ones(3, 70, dtype=torch.bool)
    mask[1, :9] = False
    torch.testing.assert_close(program(x, mask), torch.stack([x[0, 0], x[1, 9], x[2, 0]]), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning:copyreg", "ignore:# The axis name")  # raised inside torch.onnx
@pytest.mark.skipif(not HAS_ONNX, reason='ONNX is not installed (pip install ".[onnx]" in a clone)')
@torch.no_grad()
def test_onnx_runtime_computes_the_encoder_at_every_length(tmp_path):
    from onnxruntime import InferenceSession

    config = ALiBiBertConfig(**SIZES, backend="dense")
    model = ALiBiBertModel(config).eval()
    sizes = {0: Dim("batch"), 1: Dim("length")}
    names = ["input_ids", "attention_mask"]
    torch.onnx.export(
        model,
        draw(2, 11),
        tmp_path / "encoder.onnx",
        dynamo=True,
        verbose=False,
        input_names=names,
        output_names=["last_hidden_state", "pooler_output"],
        dynamic_shapes=dict.fromkeys(names, sizes),
    )
    session = InferenceSession(tmp_path / "encoder.onnx")
    exact = ALiBiBertModel(ALiBiBertConfig(**SIZES)).eval()
    exact.load_state_dict(model.state_dict())
    for batch, length in ((2, 11), (1, 1), (3, 7), (3, 200), (1, 1500)):
        ids, mask = draw(batch, length)
        states, pooled = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        expected = exact(ids, mask)
        torch.testing.assert_close(torch.from_numpy(states), expected.last_hidden_state, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(pooled), expected.pooler_output, rtol=1e-5, atol=1e-5)
