"""Where forward of the Triton kernels has no online softmax because the certificate bounds its scores, interpreted."""

from concurrent.futures import ProcessPoolExecutor

import conformance_on_device as device
import fixed_in_interpreter as inside
import pytest
import torch


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("slope", [0.0, 0.05])
def test_scores_up_to_the_limit_need_no_online_softmax(
    interpreter: ProcessPoolExecutor, slope: float, dtype: str
) -> None:
    """Beyond it, results without online softmax would not be finite."""
    assert interpreter.submit(device.conform_fixed, slope, dtype, "cpu").result() <= 1


def test_results_differ_from_online_softmax_by_rounding(interpreter: ProcessPoolExecutor) -> None:
    output, lse, online_output, online_lse = interpreter.submit(inside.of_noise).result()
    assert not torch.equal(lse, online_lse), "softmax was online everywhere"
    torch.testing.assert_close(lse, online_lse, rtol=0, atol=1e-6)
    torch.testing.assert_close(output, online_output, rtol=0, atol=1e-6)


def test_bad_numbers_change_what_they_did(interpreter: ProcessPoolExecutor) -> None:
    """Blocks that see them have the bits of online softmax."""
    clean, hurt = interpreter.submit(inside.with_bad_numbers).result()
    for (found, online), end in zip(hurt, (192, None, None), strict=True):
        assert int(found.isnan().any(-1).sum()) == (1 if end else 256 - 140)
        same = slice(128, end)
        torch.testing.assert_close(found[:, :, same], online[:, :, same], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found[:, :, :128], clean[:, :, :128])


def test_no_score_exceeds_its_limit(interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(inside.attacked, range(6), long=0).result()
    assert max(worst for worst, _, _ in found) <= 0, found
    assert max(differ for _, _, differ in found) < 1, found
    assert sum(blocks > 0 for _, blocks, _ in found) >= 3, "an attack on nothing"
