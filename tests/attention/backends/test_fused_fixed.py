"""Where forward of the Triton kernels has no online softmax because the certificate bounds its scores, interpreted."""

import conformance_on_device as device
import fixed_in_interpreter as inside
import pytest
import torch

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("slope", [0.0, 0.05])
def test_scores_up_to_the_limit_need_no_online_softmax(slope: float, dtype: str) -> None:
    """Beyond it, results without online softmax would not be finite."""
    assert device.conform_fixed(slope, dtype, "cpu") <= 1


def test_results_differ_from_online_softmax_by_rounding() -> None:
    (output, lse, _), online = inside.run(inside.noise()), inside.run(inside.noise(), inside.EVERYWHERE)
    assert not torch.equal(lse, online[1]), "softmax was online everywhere"
    torch.testing.assert_close(lse, online[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(output, online[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("which", "end"), [(1, 192), (2, None), (3, None)], ids=["query", "key", "value"])
def test_bad_numbers_change_what_they_did(which: int, end: int | None) -> None:
    """In row 140: blocks that see them have the bits of online softmax."""
    call = inside.noise()
    clean = inside.run(call)[0]
    call[which][:, :, 140, 3] = torch.nan
    found, online = inside.run(call)[0], inside.run(call, inside.EVERYWHERE)[0]
    assert int(found.isnan().any(-1).sum()) == (1 if end else 256 - 140)
    same = slice(128, end)
    torch.testing.assert_close(found[:, :, same], online[:, :, same], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[:, :, :128], clean[:, :, :128])


def test_no_score_exceeds_its_limit() -> None:
    worst, blocks, differ = zip(*map(inside.attacked, range(6)), strict=True)
    assert max(worst) <= 0
    assert max(differ) < 1
    assert sum(share > 0 for share in blocks) >= 3, "an attack on nothing"
