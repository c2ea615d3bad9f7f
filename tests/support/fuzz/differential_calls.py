"""Random calls of the whole contract; `differential_arrays.py` has their numbers, `differential_fuzz.py` runs them.

`draw` makes a call, and `plainer` is the strategy by which hypothesis shrinks one that fails.
Nothing here is imported from the package: a call is described in the contract's terms.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call, with every number drawn from `seed`; each field's default is its simplest value."""

    seed: int = 0
    dtype: str = "float32"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    query_len: int = 1
    key_len: int = 1
    head_dim: int = 1
    causal: bool = True
    slopes: str = (
        "random"  # random, published, batch, zero, negative, steep negative, huge, enormous, extreme, vanishing, mixed
    )
    slopes_as: str = "float32"  # float32, float64, low (the dtype of query), list, none (published; with gates zeros)
    right: str | None = None  # random, batch, inf, all inf, zero, negative, steep
    window: int | None = None
    scale: float | None = None
    offset: int | None = None
    offset_as: str = "int"  # int, 0-d, batch (then `offset` belongs to the first sequence, and others are near it)
    mask: str | None = None  # random, sparse, left, right, all, one
    segments: str | None = None  # sorted, unsorted
    segment_ids: str = "few"  # few, negative, large
    segments_as: str = "one"  # one, pair
    integers: str = "int64"  # of segments and offsets: int64, int32, int16, uint8 (where they fit)
    layout_masks: str = (
        "contiguous"  # of key mask, segments, slopes and the gradient of lse: apart, same batch, negative
    )
    layout_query: str = "contiguous"
    layout_key: str = "contiguous"
    layout_value: str = "contiguous"
    layout_grad: str = "contiguous"  # one of the layouts, or zero, or one number for all
    peaked: float = 1.0  # factor on queries
    outlier_key: float = 1.0  # factor on some keys
    outlier_value: float = 1.0  # factor on some values
    size_query: float = 1.0
    size_key: float = 1.0
    size_value: float = 1.0
    bad: str | None = (
        None  # "unseen": NaN, inf, huge numbers in entries hidden from all queries; "seen": also in partly visible ones
    )
    tolerance: float | None = None
    return_lse: bool = True
    through: str = "both"  # output, lse, both: the results whose gradients are backpropagated
    wanted: str = "all"  # all, inputs, slopes, query, key, none, inference
    wild_blind: bool = False  # NaN arrives as the gradient of queries that see nothing
    threads: int = 1
    value_is_key: bool = False  # one tensor is both
    is_repeated: bool = False  # a second run must be bit-identical
    asks_reach: bool = False  # `head_reach` and `explain` are called too
    key_bias: str | None = None  # one of KEY_BIASES
    key_bias_as: str = "float32"  # float32, float64
    key_bias_shape: str = "BHS"  # BHS, HS, B1S, S: [B, H, S] or what broadcasts to it
    layout_key_bias: str = "contiguous"  # apart, transposed, same batch, negative
    dropout_p: float = 0.0
    torch_seed: int = 0  # for torch's generator, from which a call with dropout draws its seed
    gates: str | None = None  # one of GATES: the call goes to forgetting_attention
    gates_as: str = "float32"  # float32, float64
    gates_shape: str = "BHS"  # BHS, BKS
    layout_gates: str = "contiguous"  # apart, transposed, negative
    sinks: str | None = None  # one of SINKS

    def __repr__(self) -> str:
        said = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default or f.name == "seed"
        ]
        return f"Call({', '.join(said)})"

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def is_huge(self) -> bool:
        """Whether products may overflow fp32; a result is then only required if plain PyTorch returns a number."""
        return max(self.size_query, self.size_key, self.size_value) > 1e6

    @property
    def factor(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def share(self) -> float:
        """The largest share of softmax mass that may be skipped."""
        return 2.0 ** -BITS[self.dtype] / 32 if self.tolerance is None else self.tolerance


# "isolated": a few keys of ±1e3 to ±3e38 at random positions.
KEY_BIASES = ("noise", "gates", "steep gates", "rising", "spikes", "hidden", "wide", "constant", "isolated")
KEY_BIAS_SHARE = 0.3  # of the draws
# "isolated": a few gates of −1e3 to −3e38 at random positions; "cuts": a few of −inf; "both": some of each.
GATES = ("open", "isolated", "cuts", "both")
GATES_SHARE = 0.15
SINKS = ("noise", "some none", "huge")  # of the sink logits: around 0, −inf in some heads, ±1e4
SINKS_SHARE = 0.1
EMPTY_SHARE = 0.015
EXTREME_SHARE = 0.02
DROPOUT_SHARE = 0.1


INPUTS = ("query", "key", "value", "slopes", "right_slopes", "key_bias", "log_fgate", "sink_logits")
WANTED = {"all": INPUTS, "inputs": INPUTS[:3], "slopes": INPUTS[3:], "query": ("query",), "key": ("key",),
          "none": (), "inference": ()}  # fmt: skip


def lse_dtype(call: Call) -> str:
    """fp64 if query or the key bias is fp64, else fp32."""
    wide = call.dtype == "float64" or (call.key_bias is not None and call.key_bias_as == "float64")
    return "float64" if wide else "float32"


def slopes_dtype(call: Call) -> str:
    """The dtype of the slopes tensor, and so of its gradient. fp16 becomes bf16, because fp16 cannot hold 1e30."""
    if call.slopes_as == "low":
        return "bfloat16" if call.dtype == "float16" else call.dtype
    return "float32" if call.slopes_as == "float32" else "float64"


def wanted(call: Call) -> tuple[str, ...]:
    """The inputs that receive gradients, among the tensors that are passed."""
    given = {"slopes": call.slopes_as not in ("list", "none"), "key_bias": call.key_bias is not None,
             "log_fgate": call.gates is not None, "sink_logits": call.sinks is not None,
             "right_slopes": call.right is not None and call.slopes_as != "list", "value": not call.value_is_key}  # fmt: skip
    return tuple(x for x in WANTED[call.wanted] if given.get(x, True))


@st.composite
def plainer(draw: Callable[[st.SearchStrategy], float], call: Call) -> Call:
    """Calls that differ from this one in fields that are at their default, and in smaller numbers."""

    def between(plain: object, value: object) -> object:
        if value == plain:
            return value
        steps = [plain]
        if type(value) is int:  # then also halves of it, and its neighbor
            steps += [part for n in range(value.bit_length(), 0, -1) if (part := int(value / 2**n)) and part != plain]
            steps += [value - (value > 0) + (value < 0)]
        return draw(st.sampled_from([*steps, *[value] * len(steps)]))

    names = [field.name for field in dataclasses.fields(call) if field.name not in ("seed", "heads", "kv_heads")]
    changes = {name: between(getattr(Call, name), getattr(call, name)) for name in names}
    kv_heads, group = between(1, call.kv_heads), between(1, call.group)
    return settled(dataclasses.replace(call, **changes, kv_heads=kv_heads, heads=kv_heads * group))


def draw(seed: int) -> Call:
    """The call of a seed."""
    rng = np.random.default_rng([seed, 20240229])

    def pick(*options, of=None):
        return options[int(rng.choice(len(options), p=None if of is None else np.array(of) / sum(of)))]

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    dtype = pick("float32", "float64", "bfloat16", "float16", of=(70, 10, 10, 10))
    batch, kv_heads, group = pick(1, 2, 3), pick(1, 2, 3, 5), pick(1, 2, 3, 4, 16, of=(50, 30, 10, 10, 1))
    t, s = _lengths(rng, pick)
    while batch * kv_heads * group * t * s > 300_000 and batch * kv_heads * group > 1:
        batch, kv_heads, group = max(1, batch - 1), max(1, kv_heads - 1), max(1, group - 1)
    causal = chance(0.55)
    huge = dtype in ("float32", "bfloat16") and chance(0.04)
    slopes = pick(
        "random", "published", "batch", "zero", "negative", "steep negative", "huge", "enormous", "vanishing", "mixed",
        of=(30, 20, 10, 5, 8, 6, 4, 2, 3, 12),
    )  # fmt: skip
    call = Call(
        seed=seed, dtype=dtype, batch=batch, heads=kv_heads * group, kv_heads=kv_heads, query_len=t, key_len=s,
        head_dim=pick(*(1, 2, 3, 7, 8, 15, 16, 17, 20, 31, 32, 33, 64, 65, 80, 128), int(rng.integers(1, 260))),
        causal=causal, slopes=slopes,
        slopes_as="none" if slopes == "published" and chance(0.3) else pick("float32", "float64", "low", "list",
                                                                            of=(12, 1, 1, 1)),
        right=None if causal or chance(0.6) else pick("random", "batch", "inf", "all inf", "zero", "negative", "steep"),
        window=None if chance(0.65) else pick(1, 2, int(rng.integers(1, 20)), 64, int(rng.integers(1, s + 2)), s + 50, 2**33),
        scale=None if chance(0.65) else pick(0.0, -0.3, -1.0, 1.0, 0.05, 8.0, -1e-3, 1e-6),
        tolerance=None if chance(0.7) else pick(0.0, 1e-3, 1e-2, 1e-6, 0.3, 0.9),
        peaked=1.0 if chance(0.7) else pick(0.0, 1e-3, 4.0, 30.0, 300.0, -1.0),
        outlier_key=1.0 if chance(0.7) else pick(10.0, 100.0, 1e3, 1e4, 1e8, 1e15),
        outlier_value=1.0 if chance(0.75) else pick(10.0, 100.0, 1e4, 1e8, 1e15, 1e20),
        bad=pick(None, "unseen", "seen", of=(80, 15, 5)), wild_blind=chance(0.03),
        return_lse=chance(0.75), through=pick("both", "output", "lse", of=(6, 3, 1)),
        wanted=pick("all", "inputs", "slopes", "query", "key", "none", "inference", of=(28, 8, 2, 2, 2, 3, 1)),
        value_is_key=chance(0.03), is_repeated=chance(0.06), asks_reach=chance(0.12),
        threads=1 if chance(0.85) else pick(2, 3, 16),
        integers="int64" if chance(0.7) else pick("int32", "int16", "uint8"),
        layout_masks="contiguous" if chance(0.8) else pick("apart", "same batch", "negative"),
        **{f"size_{x}": _size(rng, pick) if huge and chance(0.5) else 1.0 for x in ("query", "key", "value")},
        **_layouts(rng, pick, chance),
    )  # fmt: skip
    call = _biased(_placed(call, rng, pick, chance), pick, chance)
    call = _extreme(_gated(_dropping(call, rng, pick, chance), pick, chance), pick, chance)
    return settled(dataclasses.replace(call, sinks=pick(*SINKS) if chance(SINKS_SHARE) else None))


def _biased(call: Call, pick, chance) -> Call:
    """Adds a key bias, drawn after all other fields so that they do not depend on it."""
    return dataclasses.replace(
        call, key_bias=pick(*KEY_BIASES, of=(3, 3, 2, 2, 2, 4, 3, 2, 6)) if chance(KEY_BIAS_SHARE) else None,
        key_bias_as="float32" if chance(0.7) else "float64", key_bias_shape=pick("BHS", "HS", "B1S", "S", of=(5, 2, 2, 1)),
        layout_key_bias="contiguous" if chance(0.6) else pick("apart", "transposed", "same batch", "negative"),
    )  # fmt: skip


def _dropping(call: Call, rng: np.random.Generator, pick, chance) -> Call:
    """Adds dropout, drawn after all earlier fields."""
    if not chance(DROPOUT_SHARE):
        return call
    p = pick(0.1, 0.5, 0.9, float(10 ** -rng.uniform(2, 12)))  # the last so small that at most one weight is dropped
    return dataclasses.replace(call, dropout_p=p, torch_seed=int(rng.integers(2**31)))


def _gated(call: Call, pick, chance) -> Call:
    """Adds forget gates."""
    if not chance(GATES_SHARE):
        return call
    return dataclasses.replace(
        call, gates=pick(*GATES), gates_as=pick("float32", "float64", of=(3, 1)), gates_shape=pick("BHS", "BKS", of=(3, 1)),
        layout_gates="contiguous" if chance(0.7) else pick("apart", "transposed", "negative"),
    )  # fmt: skip


def _extreme(call: Call, pick, chance) -> Call:
    """Replaces the batch by an empty one, or the slopes by the largest or smallest of fp32."""
    changes: dict[str, object] = {"batch": 0} if chance(EMPTY_SHARE) else {}
    if chance(EXTREME_SHARE):
        changes |= {"slopes": "extreme", "slopes_as": pick("float32", "list")}
    return dataclasses.replace(call, **changes)


def _size(rng: np.random.Generator, pick) -> float:
    """A factor for all numbers of an input: huge, or so small that squares underflow."""
    return float(10.0 ** (rng.uniform(18, 30) if pick(True, True, False) else -rng.uniform(8, 37)))


LAYOUTS = (
    "transposed", "packed", "rows apart", "heads apart", "padded", "columns", "columns apart", "from the middle",
    "same batch", "same head", "same row", "negative", "imaginary",
)  # fmt: skip


def _lengths(rng: np.random.Generator, pick) -> tuple[int, int]:
    def length() -> int:
        kind = pick("few", "edge", "some", "more", of=(30, 25, 35, 10))
        if kind == "few":
            return int(rng.integers(1, 21))
        if kind == "edge":
            return pick(1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
        return int(rng.integers(20, 201)) if kind == "some" else int(rng.integers(200, 450))

    kind = pick("equal", "any", "one query", "long", "many keys", "many queries", "nothing", of=(35, 41, 9, 8, 3, 3, 1))
    if kind == "nothing":
        return pick((0, 9), (9, 0), (0, 0))
    if kind == "equal":
        t = length()
        return t, t
    if kind == "long":
        t = int(rng.integers(500, 1500))
        return t, t if pick(True, False) else int(rng.integers(500, 1500))
    if kind == "many keys":
        return pick(1, 7, 30, 64, 100), int(rng.integers(1500, 5000))
    if kind == "many queries":
        return int(rng.integers(1500, 4000)), pick(1, 7, 64, 65, 100)
    return 1 if kind == "one query" else length(), length()


def _layouts(rng: np.random.Generator, pick, chance) -> dict[str, str]:
    drawn = {f"layout_{x}": "contiguous" if chance(0.6) else pick(*LAYOUTS) for x in ("query", "key", "value", "grad")}
    if chance(0.3):  # typical layouts in a model
        drawn |= dict.fromkeys(("layout_query", "layout_key", "layout_value"), pick("transposed", "packed"))
    if chance(0.15):
        drawn["layout_grad"] = pick("zero", "one number")
    return drawn


def _placed(call: Call, rng: np.random.Generator, pick, chance) -> Call:
    """Draws the fields that depend on the lengths."""
    t, s = call.query_len, call.key_len
    changes: dict[str, object] = {}
    if chance(0.4):
        near = int(rng.integers(-t - 3, s + 4))
        far = pick(-1, 1) * (2**40 if chance(0.05) else int(10 ** rng.uniform(2, 6)))
        inside = int(rng.integers(0, max(1, s - t + 1)))
        where = pick("near", "far", "inside", "before", "after", of=(4, 2, 3, 1, 1))
        changes["offset"] = {"near": near, "far": far, "inside": inside, "before": -t - 1, "after": s + 2}[where]
        changes["offset_as"] = pick("int", "0-d", "batch")
    if chance(0.3):
        changes["mask"] = pick("random", "sparse", "left", "right", "all", "one", of=(5, 2, 4, 2, 1, 1))
    if chance(0.25):
        changes["segments"] = pick("sorted", "unsorted")
        changes["segment_ids"] = pick("few", "negative", "large")
        changes["segments_as"] = pick("one", "pair")
    return dataclasses.replace(call, **changes)


def settled(call: Call) -> Call:
    """Resolves contradictions between fields."""
    changes: dict[str, object] = {}
    if call.gates is not None:  # causal, with all queries among the keys
        query_len = min(call.query_len, call.key_len)
        inside = call.offset is not None and 0 <= call.offset <= call.key_len - query_len
        call = dataclasses.replace(
            call, causal=True, right=None, query_len=query_len, offset=call.offset if inside else None, offset_as="int",
            asks_reach=False,
        )  # fmt: skip
    else:
        changes |= {"gates_as": "float32", "gates_shape": "BHS", "layout_gates": "contiguous"}
    if call.segments_as == "one" and call.segments is not None:
        first = call.key_len - call.query_len if call.offset is None else call.offset
        if call.offset_as == "batch" or first < 0 or first + call.query_len > call.key_len:
            changes["segments_as"] = "pair"
    if not call.return_lse or call.through == "output":
        changes |= {"through": "output", "return_lse": call.return_lse}
    lowest, highest = {"int64": (-9e18, 9e18), "int32": (-2e9, 2e9), "int16": (-3e4, 3e4), "uint8": (0, 255)}[
        call.integers
    ]
    if call.segment_ids == "large" or (call.segment_ids == "negative" and lowest == 0):
        changes["integers"] = "int64"
    if (
        call.offset is not None
        and not lowest <= call.offset - call.query_len - 4 <= highest - call.key_len - call.query_len - 8
    ):
        changes["integers"] = "int64"
    if call.value_is_key:
        changes["layout_value"] = call.layout_key
    if call.is_huge:
        changes |= {"bad": None, "wild_blind": False, "asks_reach": False, "sinks": None}
    if call.key_bias is None:
        changes |= {"key_bias_as": "float32", "key_bias_shape": "BHS", "layout_key_bias": "contiguous"}
    if call.bad == "seen":  # the gradient of a sink sums over all queries, including those that see NaN
        changes["sinks"] = None
    if call.dropout_p == 0:
        changes["torch_seed"] = 0
    if call.batch == 0 and call.slopes_as == "list":  # an empty list has no number of heads
        changes["slopes_as"] = "float32"
    return dataclasses.replace(call, **changes)
