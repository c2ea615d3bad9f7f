"""The cases that every backend in PyTorch and JAX must compute correctly, as numpy arrays, for conformance tests."""

import dataclasses

import numpy as np

from alibi_attn.slopes import alibi_slopes


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, with everything drawn from `seed`. `offset` "batch" means one offset per sequence, as an array."""

    name: str
    batch: int = 2
    heads: int = 4
    kv_heads: int | None = None
    query_len: int = 13
    key_len: int = 13
    head_dim: int = 8
    causal: bool = True
    slopes: str = "published"  # published, random, batch, zero, negative, steep
    right: str | None = None  # random, batch, inf
    window: int | None = None
    scale: float | None = None
    offset: int | str | None = None
    mask: str | None = None  # random, left, all, nan
    segments: str | None = None  # packed, pair
    key_bias: str | None = None  # random, gates, rising, spikes, hidden, one, of heads; see `_key_bias`
    peaked: float = 1.0  # factor on queries: larger = sharper softmax
    sink: float = 1.0  # factor on key 0
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def draw(self) -> dict[str, np.ndarray | None]:
        """Float64 arrays in PyTorch's layout, by the contract's keywords, plus the two gradients."""
        rng = np.random.default_rng(self.seed)
        b, h, t, s, d = self.batch, self.heads, self.query_len, self.key_len, self.head_dim
        k = self.kv_heads or h
        key = rng.standard_normal((b, k, s, d))
        key[:, :, 0] *= self.sink
        drawn = {
            "query": rng.standard_normal((b, h, t, d)) * self.peaked,
            "key": key,
            "value": rng.standard_normal((b, k, s, d)),
            "slopes": self._slopes(rng),
            "right_slopes": self._right(rng),
            "query_offset": rng.integers(-2, max(s - t, 0) + 3, b) if self.offset == "batch" else None,
            "key_mask": self._mask(rng),
            "query_segments": None,
            "key_segments": None,
            "key_bias": None,
            "grad_output": rng.standard_normal((b, h, t, d)),
            "grad_lse": rng.standard_normal((b, h, t)),
        }
        # Half precision must represent the inputs exactly, so that all dtypes compute the same problem.
        for name in ("query", "key", "value", "grad_output", "grad_lse"):
            drawn[name] = np.round(drawn[name] * 16) / 16
        if self.segments is not None:
            drawn["key_segments"] = np.sort(rng.integers(0, 3, (b, s)), axis=1)
        if self.segments == "pair":
            drawn["query_segments"] = rng.integers(0, 4, (b, t))
        if self.key_bias is not None:
            drawn["key_bias"] = self._key_bias(rng)
        if self.mask == "nan":
            hidden = ~drawn["key_mask"]
            drawn["key"][np.broadcast_to(hidden[:, None], (b, k, s))] = np.nan
            drawn["value"][np.broadcast_to(hidden[:, None], (b, k, s))] = np.inf
        return drawn

    @property
    def first_position(self) -> int:
        """Position of query 0 unless an array of offsets is given."""
        return self.offset if isinstance(self.offset, int) else self.key_len - self.query_len

    def _slopes(self, rng: np.random.Generator) -> np.ndarray:
        published = alibi_slopes(self.heads)
        if self.slopes == "random":
            return rng.uniform(0.01, 1.0, self.heads).astype(np.float32).astype(np.float64)
        if self.slopes == "batch":
            return rng.uniform(0.01, 1.0, (self.batch, self.heads)).astype(np.float32).astype(np.float64)
        if self.slopes == "zero":
            return np.where(np.arange(self.heads) % 2 == 0, 0.0, published)
        if self.slopes == "negative":
            return np.where(np.arange(self.heads) % 2 == 0, -0.03125, published)
        if self.slopes == "steep":
            return np.exp2(2.0 - np.arange(self.heads) % 4)
        return published.astype(np.float32).astype(np.float64)

    def _right(self, rng: np.random.Generator) -> np.ndarray | None:
        if self.right is None:
            return None
        shape = (self.batch, self.heads) if self.right == "batch" else (self.heads,)
        right = rng.uniform(0.01, 1.0, shape).astype(np.float32).astype(np.float64)
        return np.where(np.arange(self.heads) % 2 == 0, np.inf, right) if self.right == "inf" else right

    def _key_bias(self, rng: np.random.Generator) -> np.ndarray:
        """One number per key, exact in fp32: [B, H, S], [H, S] for "of heads", [S] for "one"."""
        shape = (self.batch, self.heads, self.key_len)
        if self.key_bias == "one":
            return np.round(rng.standard_normal(self.key_len) * 64) / 64
        if self.key_bias == "of heads":
            return np.round(rng.standard_normal(shape[1:]) * 64) / 64
        bias = np.round(rng.standard_normal(shape) * 64) / 64
        if self.key_bias in ("gates", "rising"):  # sums of the logarithms of gates: every key weighs less than the next
            bias = np.cumsum(np.abs(bias), -1) * (1 if self.key_bias == "gates" else -1)
        if self.key_bias == "spikes":
            bias[rng.random(shape) < 0.02] += 20.0
        if self.key_bias == "hidden":
            bias[rng.random(shape) < 0.3] = -np.inf
            bias[0, 0] = -np.inf
        return bias

    def _mask(self, rng: np.random.Generator) -> np.ndarray | None:
        shape = (self.batch, self.key_len)
        if self.mask is None:
            return None
        if self.mask == "left":  # left padding of different lengths
            return np.arange(self.key_len) >= rng.integers(1, self.key_len, (self.batch, 1))
        if self.mask == "all":
            return np.zeros(shape, dtype=bool)
        return rng.random(shape) < 0.6


def square(name: str, length: int, **fields: object) -> Case:
    """As many queries as keys, in one sequence of two heads if no other numbers are given."""
    return Case(name, **{"batch": 1, "heads": 2, "query_len": length, "key_len": length} | fields)


EVERYTHING = {"causal": False, "slopes": "batch", "right": "inf", "offset": "batch", "mask": "nan", "segments": "pair"}
CASES = (
    Case("plain"),
    Case("one head", heads=1, head_dim=3),
    Case("six heads", heads=6, query_len=9, key_len=9),
    Case("twelve heads, slopes not sorted", heads=12, query_len=9, key_len=9),
    Case("71 heads over one key head", batch=1, heads=71, kv_heads=1, query_len=5, key_len=5),
    Case("grouped-query", heads=6, kv_heads=2),
    Case("one query", query_len=1, key_len=17),
    Case("queries at the end of longer keys", query_len=5, key_len=19, kv_heads=2),
    Case("more queries than keys", query_len=19, key_len=5),
    Case("symmetric", causal=False),
    Case("symmetric, more keys", causal=False, query_len=6, key_len=20, kv_heads=1),
    Case("right slopes", causal=False, right="random"),
    Case("right slopes a batch", causal=False, right="batch", slopes="batch", batch=3),
    Case("heads that never look right", causal=False, right="inf"),
    Case("window", window=4),
    Case("window of one", window=1),
    Case("symmetric window", causal=False, window=3, kv_heads=2),
    Case("window beyond the keys", window=100),
    Case("scale", scale=0.7),
    Case("negative scale", scale=-0.3),
    Case("offset inside", offset=3, query_len=5, key_len=20),
    Case("offset before all keys", offset=-9, query_len=5, key_len=7),
    Case("offset partly before", offset=-2, query_len=5, key_len=7),
    Case("offset after all keys", offset=40, query_len=5, key_len=12),
    Case("offset after, symmetric", offset=40, query_len=5, key_len=12, causal=False),
    Case("offset before, symmetric", offset=-30, query_len=5, key_len=12, causal=False, right="random"),
    Case("an offset a sequence", offset="batch", batch=3, query_len=5, key_len=12),
    Case("an offset a sequence, window", offset="batch", batch=3, query_len=5, key_len=12, window=4, causal=False),
    Case("key mask", mask="random"),
    Case("left padding", mask="left", kv_heads=2),
    Case("nothing may be seen", mask="all"),
    Case("NaN in masked keys, inf in their values", mask="nan", kv_heads=2, query_len=11, key_len=16),
    Case("packed segments", segments="packed"),
    Case("packed segments, symmetric, mask", segments="packed", causal=False, mask="random"),
    Case("segments for queries and keys", segments="pair", query_len=9, key_len=15, causal=False),
    Case("segments and offset", segments="packed", offset=4, query_len=6, key_len=18),
    Case("slopes a batch", slopes="batch"),
    Case("slopes zero", slopes="zero"),
    Case("slopes negative", slopes="negative", query_len=21, key_len=21),
    Case("random slopes", slopes="random", heads=5),
    Case("everything", 3, 6, 3, query_len=14, key_len=23, window=9, scale=0.4, **EVERYTHING),
    square("steep, long", 301, heads=4, kv_heads=2, slopes="steep", head_dim=16),
    square("steep, long, symmetric", 261, slopes="steep", causal=False, head_dim=4),
    square("steep, long, sink, peaked", 223, slopes="steep", sink=30.0, peaked=2.0),
    Case("steep, long, window and mask", 2, 2, query_len=200, key_len=260, slopes="steep", window=150, mask="random"),
    square("steep, long, segments", 290, slopes="steep", segments="packed"),
    square("steep, long, chunk", 300, heads=4, query_len=40, slopes="steep", offset=200),
)
# For other dtypes and instructions.
SOME_NAMES = {
    "plain", "grouped-query", "one query", "queries at the end of longer keys", "right slopes a batch",
    "heads that never look right", "symmetric window", "an offset a sequence", "NaN in masked keys, inf in their values",
    "everything", "steep, long", "steep, long, sink, peaked", "steep, long, segments",
}  # fmt: skip
SOME = tuple(case for case in CASES if case.name in SOME_NAMES)
KEY_BIASES = (
    Case("key bias", key_bias="random"),
    Case("key bias, one for all", key_bias="one", kv_heads=2, slopes="zero"),
    Case("key bias of heads", key_bias="of heads", query_len=6, key_len=20, causal=False, right="random"),
    Case("key bias, gates", key_bias="gates", slopes="zero", query_len=21, key_len=21),
    Case("key bias, hidden keys", key_bias="hidden", kv_heads=2, query_len=9, key_len=17, causal=False),
    Case("key bias, mask and segments", key_bias="hidden", mask="nan", segments="packed", kv_heads=1),
    Case("key bias, offset", 3, key_bias="random", offset="batch", query_len=5, key_len=12, window=4, causal=False),
    Case("key bias, negative slopes", key_bias="gates", slopes="negative", query_len=19, key_len=19, scale=-0.4),
    square("key bias, long, gates", 301, batch=2, heads=4, kv_heads=2, key_bias="gates", slopes="zero"),
    square("key bias, long, gates and slopes", 330, query_len=290, key_bias="gates", slopes="steep"),
    square("key bias, long, rising", 260, key_bias="rising", slopes="random"),
    square("key bias, long, spikes", 500, heads=4, kv_heads=2, key_bias="spikes", slopes="steep"),
    square(
        "key bias, long, spikes on both sides", 500, key_bias="spikes", slopes="steep", causal=False, right="random"
    ),
    square("key bias, long, segments", 290, key_bias="gates", segments="packed"),
    square("key bias, long, window", 260, query_len=200, key_bias="gates", window=150, mask="random"),
)
# For the GPU kernels: long enough for full tiles on both sides, and for tiles without masked keys or several segments.
INSIDE = (
    square("inside", 450, slopes="random"),
    square("inside, both sides", 420, kv_heads=1, causal=False, slopes="random"),
    square("inside, right slopes", 390, batch=2, heads=1, causal=False, right="batch", slopes="batch"),
    square("inside, never right", 390, causal=False, right="inf", slopes="random"),
    square("inside, window", 450, window=230, slopes="zero"),
    square("inside, symmetric window", 450, window=230, causal=False, slopes="negative"),
    square("inside, packed segments", 500, batch=2, heads=1, segments="packed", slopes="random"),
    square("inside, segments on both sides", 500, segments="packed", causal=False, right="random"),
    square("inside, left padding", 400, batch=2, kv_heads=1, query_len=300, mask="left"),
    square("inside, chunk", 600, query_len=150, offset=317, slopes="random", head_dim=20),
    square("inside, offsets", 333, batch=2, heads=1, query_len=300, offset="batch", causal=False, window=270),
)
SHORT_INSIDE = (
    square("short inside", 210, slopes="random"),
    square("short inside, right slopes", 150, causal=False, right="random", window=120),
)
# Here every product with a distance is a million times the final sum.
FAR = {"heads": 2, "key_len": 1, "slopes": "random"}
ONE_FAR_KEY = (
    Case("one key far to the left", query_len=130, offset=10**6, **FAR),
    Case("one key far to the right", query_len=130, offset=-(10**6), causal=False, **FAR),
    Case("one key, right slopes", query_len=70, offset=-(10**6), right="random", causal=False, **FAR),
)
