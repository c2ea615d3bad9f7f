"""An encoder in ONNX Runtime: exported as described in docs/encoders.md, and in int8 by dynamic quantization."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

NAMES = ["input_ids", "attention_mask"]


def write(model: PreTrainedModel, path: Path, precision: str) -> None:
    """Exports the model with the original's arithmetic, a bias and scores of all n² pairs, to `path` (.onnx).

    Args:
        model: an encoder with backend="dense".
        precision: float32, or int8, which quantizes the matrices with one scale per output.
    """
    from onnxruntime import quantization

    exported = path.with_suffix(".fp32.onnx") if precision == "int8" else path
    example = torch.ones(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    shapes = dict.fromkeys(NAMES, sizes)
    torch.onnx.export(model, example, exported, dynamo=True, input_names=NAMES, dynamic_shapes=shapes, verbose=False)
    if precision == "int8":
        quantization.quantize_dynamic(exported, path, per_channel=True, weight_type=quantization.QuantType.QInt8)


class OnnxRuntime:
    """A session with all graph optimizations. The graph also computes padding."""

    def __init__(self, path: Path, *, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids [B, T] and their mask -> hidden states [B, T, E]."""
        outputs = self._session.run(None, dict(zip(NAMES, (ids.numpy(), mask.numpy()), strict=True)))
        return torch.from_numpy(outputs[0])
