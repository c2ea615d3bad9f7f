"""The C++ kernels: their results, the order of their sums, and machines without a compiler."""

import ctypes
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from alibi_attn import alibi_attention, explain
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.visited import numbers_of_visited
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.bounds import bounds
from alibi_attn.attention.certificate.constants import TILE

SLOPES = [2.0, 0.5, 0.1, 0.02]


def draw(h=4, k=4, t=1500, d=16, dtype=torch.float32, b=1, requires_grad=False):
    shapes = [(b, heads, t, d) for heads in (h, k, k)]
    return [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]


@pytest.fixture(scope="module")
def counting_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("counting")))
        patch.setattr(build, "FLAGS", (*(flag for flag in build.FLAGS if flag != "-O3"), "-O0", "-DALIBI_COUNT"))
        build._found.cache_clear()
        library = build.library()
    build._found.cache_clear()
    library.alibi_counter.restype = ctypes.POINTER(ctypes.c_int64)
    return library


@pytest.fixture
def counting(counting_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Runs slow kernels that count; returns the scores computed since the previous call."""
    monkeypatch.setattr(build, "library", lambda **_: counting_library)
    counter = counting_library.alibi_counter()

    def counted() -> int:
        found, counter[0] = counter[0], 0
        return found

    return counted


def test_the_scores_computed_are_those_of_the_certificate(counting: Callable[[], int]) -> None:
    q, k, v = draw(requires_grad=True)
    with torch.no_grad():
        q *= 2
    spec = make_spec(q, k, v, SLOPES)
    with torch.no_grad():
        found = bounds(spec, q, k, v)
        visits = native.visits(spec, q, k, v)
        scores, of_backward = int(visits.scores.sum()), int(visits.measured_scores.sum())
        of_inference = int(native.visited(spec, q, k, v, for_backward=False).reach_and_scores(spec)[1].sum())
    counting()
    out = alibi_attention(q, k, v, SLOPES, backend="native")
    assert counting() == scores
    out.sum().backward()
    assert counting() == of_backward < 0.97 * scores
    with torch.no_grad():
        assert torch.equal(alibi_attention(q, k, v, SLOPES, backend="native"), out)
    assert counting() == of_inference < 0.99 * scores
    assert f"scores computed: {scores:,} " in str(explain(q, k, v, SLOPES, backend="native"))
    # The keys that a block of 64 queries visits by the other backends' bounds, which do not use the log-sum-exp.
    start = torch.arange(0, 1500, TILE)
    rows = (1500 - start).clamp(max=TILE)
    asked = (torch.minimum(found.left[0] - 1, start) + rows) * rows
    assert of_inference <= 1.02 * int(asked.sum())
    assert scores < 0.5 * 4 * 1500 * 1501 / 2


def test_a_kernel_that_computes_everything_is_detected(counting: Callable[[], int]) -> None:
    q, k, v = draw()
    counting()
    alibi_attention(q, k, v, SLOPES, tolerance=0.0, backend="native")
    assert counting() >= 4 * 1500 * 1501 / 2


def test_outlier_tiles_are_counted_too(counting: Callable[[], int]) -> None:
    q, k, v = draw(h=8, k=2, b=2, t=3000, requires_grad=True)
    with torch.no_grad():
        k[:, :, 70] *= 40
    slopes = [1.0, 0.5, 0.25, 0.1, 1.0, 0.7, 0.3, 0.2]
    spec = make_spec(q, k, v, slopes)
    with torch.no_grad():
        assert native.visited(spec, q, k, v).outlier_bits.any(), "no outlier tile was visited: the test sees nothing"
        visits = native.visits(spec, q, k, v)
        scores, of_backward = int(visits.scores.sum()), int(visits.measured_scores.sum())
    counting()
    out = alibi_attention(q, k, v, slopes, backend="native")
    assert counting() == scores
    out.sum().backward()
    assert counting() == of_backward < scores
    assert scores < 0.5 * 16 * 3000 * 3001 / 2


def test_a_block_turns_to_a_sink_only_where_it_matters() -> None:
    """A flat head's far queries read a sink at key 0, a steep head's do not; it widens neither band."""
    q, k, v = draw(h=2, k=1, t=6000, d=32)
    calm = native.visits(make_spec(q, k, v, [1.0, 0.05]), q, k, v)[1][0]
    with torch.no_grad():
        k[:, :, 0] *= 60
    visited = native.visited(make_spec(q, k, v, [1.0, 0.05]), q, k, v)
    steep, flat = (visited.outlier_bits[0, h] != 0 for h in range(2))
    assert flat.sum() > 60
    assert steep.sum() < 30
    scores = visited.reach_and_scores(make_spec(q, k, v, [1.0, 0.05]))[1][0]
    assert int(scores[0]) < 1.3 * int(calm[0])
    assert int(scores[1]) < 1.3 * int(calm[1])


@pytest.mark.parametrize(("length", "most"), [(2048, 2**24 // 64), (2**18, 8 * 2 * 2**18)])
def test_many_cores_get_work_and_long_texts_keep_linear_memory(
    length: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head without a reach must not be a single task, nor be copied once per core."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    tensors = [torch.zeros(1, 1, 1, 64).expand(1, 8, length, 64) for _ in range(3)]
    spec = make_spec(*tensors, torch.zeros(8))
    numbers = numbers_of_visited(num_heads=8, num_kv_heads=8, query_len=length)
    visited = torch.zeros(1, numbers, dtype=torch.int32)
    blocks = 8 * (length // TILE)
    ranges, bands = visited[0, : 4 * blocks].view(8, -1, 4), visited[0, 5 * blocks : 7 * blocks].view(8, -1, 2)
    ranges[..., 1] = ranges[..., 3] = bands[..., 1] = torch.arange(
        TILE, length + 1, TILE
    )  # all that causal queries see
    call, _alive = native.call_of(
        spec, dict(zip(("query", "key", "value"), tensors, strict=True)), {"visited": visited}
    )
    tasks, kept = np.zeros((4096, 6), np.int64), ctypes.c_int64()
    divide = build.library().alibi_backward_tasks
    divide.restype = ctypes.c_int64
    count = divide(
        ctypes.byref(call), ctypes.c_void_p(tasks.ctypes.data), ctypes.c_int64(len(tasks)), ctypes.byref(kept)
    )
    assert kept.value <= most
    assert (64 if length == 2048 else 24) <= count <= len(tasks)
    covered, blocks = np.zeros((8, length), np.int64), np.zeros((8, length // TILE), np.int64)
    for _, head, block, last_block, own, own_end in tasks[:count]:
        covered[head, own:own_end] += 1
        blocks[head, block:last_block] += 1
    assert bool((covered == 1).all())
    assert bool((blocks == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("offset", "window"),
    [(2**30, 2**31), (2**31, 2**33), (2**30 + 100, 2**30 + 120), (2**50, 2**60), (-(2**31), 2**31 + 50), (0, 2**31)],
)
def test_windows_may_be_as_wide_as_positions_are_far(
    offset: int, window: int, causal: bool, dtype: torch.dtype
) -> None:
    q, k, v = draw(h=1, k=1, t=100, dtype=dtype)
    options = {"causal": causal, "window": window, "query_offset": offset, "key_mask": torch.arange(100)[None] != 3}
    ours, truth = (
        alibi_attention(q, k, v, [0.0], **options, return_lse=True, backend=backend)
        for backend in ("native", "reference")
    )
    for x, y in zip(ours, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exponential_is_right_to_a_unit(dtype: torch.dtype) -> None:
    """lse shows the exponential's error: the lse of scores (0, −x) is log1p(exp(−x))."""
    x = torch.cat([torch.linspace(0, 100, 5000), torch.linspace(600, 800, 50)]).to(dtype)
    q = torch.zeros(1, 1, len(x), 2, dtype=dtype)
    q[..., 0] = x
    k = torch.tensor([[0.0, 0.0], [-1.0, 0.0]], dtype=dtype)[None, None]
    v = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=dtype)[None, None]
    out = alibi_attention(q, k, v, [0.0], scale=1.0, causal=False, tolerance=0.0, backend="native")[0, 0, :, 0]
    truth = torch.sigmoid(-x.double())
    normal = truth > torch.finfo(dtype).tiny
    relative = ((out.double() - truth) / truth)[normal].abs().max()
    assert float(relative) <= 4 * torch.finfo(dtype).eps
    assert bool((out[~normal] <= torch.finfo(dtype).tiny).all())


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and a new search for the library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build._found.cache_clear()
    yield tmp_path
    build._found.cache_clear()


def test_without_a_compiler_auto_takes_the_next_and_says_why(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    q, k, v = draw()
    words = str(explain(q, k, v, SLOPES))
    assert "banded     runs (picked by auto)" in words
    assert "native     cannot: CXX names the C++ compiler 'no-such-compiler', which is not installed" in words
    assert "install g++" in words
    with pytest.raises(ValueError, match="backend 'native' cannot run this: CXX names the C\\+\\+ compiler"):
        alibi_attention(q, k, v, SLOPES, backend="native")
    torch.testing.assert_close(
        alibi_attention(q, k, v, SLOPES), alibi_attention(q, k, v, SLOPES, backend="reference"), atol=1e-5, rtol=1e-5
    )


def test_few_scores_are_left_to_dense_and_not_to_the_next() -> None:
    q, k, v = (torch.randn(1, 1, t, 8) for t in (64, 2000, 2000))
    words = str(explain(q, k, v, [0.5]))
    assert "dense      runs (picked by auto)" in words
    assert "native     can run; auto takes dense instead: short input: B·H·T·S = 128000 < 131072" in words
    assert "native     runs (picked by auto)" in str(explain(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), [0.5]))


def test_a_compiler_that_fails_is_quoted(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = elsewhere / "broken"
    broken.write_text("#!/bin/sh\necho 'error: unsupported option -fopenmp' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    assert "could not compile it: error: unsupported option -fopenmp" in str(build.why_not())


def test_the_kernels_share_the_threads_of_torch() -> None:
    """A second OpenMP runtime would have its own thread pool, which busy-waits for the first."""
    assert build.why_not() is None
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists what a process has loaded")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line.split("/")[-1]}
    # Another package may bundle its own runtime, as scikit-learn does; the kernels do not share that one.
    ours = [name for name in runtimes if ("gomp" in name or "iomp" in name) and ".libs/" not in name]
    assert len(ours) == 1


def test_the_name_in_the_cache_depends_on_every_source() -> None:
    """A header missing from the hash would be compiled once and then never again."""
    files = {path.name for path in build.FOLDER.iterdir() if path.suffix in (".cpp", ".hpp")}
    assert files == {*build.SOURCES, *build.HEADERS}


def loaded_again() -> ctypes.CDLL:
    """Loads the kernels of this process again, which repeats the check of their constants."""
    return build._load(Path(build.library()._name), functions=())


def test_constants_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller OUTLIER_TILES in Python would let the kernels write past a buffer."""
    loaded_again()
    monkeypatch.setattr(build, "FOR_CPP", build.FOR_CPP | {"OUTLIER_TILES": 2})
    with pytest.raises(build.BuildError, match=r"built with the wrong constants: .*ALIBI_OUTLIER_TILES=4 "):
        loaded_again()


def test_a_call_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ctypes.Structure):
        _fields_ = (*build.Call._fields_, ("more", ctypes.c_int64))

    monkeypatch.setattr(build, "Call", Longer)
    with pytest.raises(build.BuildError, match=f"not .*call_bytes={ctypes.sizeof(Longer)}$"):
        loaded_again()


def test_products_that_only_the_scale_brings_back_into_fp32_do_not_overflow():
    q, k = torch.full((1, 1, 1, 1), 1e20), torch.tensor([[[[9e18], [1.0]]]])
    out, lse = alibi_attention(q, k, k.new_ones(1, 1, 2, 1), [0.0], scale=0.26, return_lse=True, backend="native")
    assert out.item() == 1.0
    assert lse.item() == pytest.approx(2.34e38)
