"""Random calls of the whole contract, compared with float64; and proofs that the checker finds wrong results."""

import dataclasses
from collections.abc import Iterable

import differential_checks
import numpy as np
import pytest
import torch
from attention_cases import CASES, KEY_BIASES, Case
from attention_oracle import positions
from attention_oracle import truth as looped
from differential_arrays import Arrays, arrays
from differential_calls import GATES, SINKS, Call, draw
from differential_calls import KEY_BIASES as KINDS
from differential_checks import Answer, Question, answer, assert_agrees, assert_right, plainly
from differential_fuzz import Tally, fuzz, shrunk
from differential_truth import Truth, truth
from dropout_oracle import drawn_seed

from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend

# Seeds of each backend; all backends meet the first ones.
DRAWS = {"reference": 100, "dense": 100, "banded": 150, "native": 200}
# Minimized calls that the fuzz has found: negative slopes, a negative scale, scores recomputed with different rounding,
# keys out of sight, inputs near the limits of fp32, huge numbers in hidden entries, NaN gradients of unused outputs,
# empty inputs, log-sum-exps merged one after another, biases of keys that only some queries of a block see, NaN whose
# weights are all dropped, and (not our error) outputs that dropout scales beyond fp16. Then extreme biases and gates
# that some queries of a block do not see, views with a negative bit, and empty batches.
FOUND = (
    Call(seed=0, heads=3, kv_heads=3, query_len=129, key_len=129, head_dim=4, slopes="steep negative"),
    Call(seed=2, query_len=200, key_len=200, head_dim=4, slopes="steep negative"),
    Call(seed=8, key_len=116, slopes="steep negative"),
    Call(seed=5235, query_len=256, key_len=512, slopes="published", scale=-1.0),
    Call(seed=1, batch=2, heads=2, kv_heads=2, query_len=9, key_len=1, head_dim=20, causal=False, window=1,
         layout_key="padded", outlier_key=1e8),
    Call(seed=513, heads=2, query_len=17, key_len=16, head_dim=7, slopes="published", outlier_key=1e15),
    Call(seed=11, query_len=40, key_len=40, head_dim=4, offset=1000000),
    Call(seed=25, heads=12, kv_heads=3, query_len=2, key_len=2, head_dim=2, slopes="zero", offset=11135),
    Call(seed=491, head_dim=19, peaked=-1.0, outlier_key=1e3, size_key=4.7e27, through="output"),
    Call(seed=89, query_len=328, head_dim=4, outlier_key=1e2, size_query=2.9e23, through="output"),
    Call(seed=505, query_len=7, key_len=6, head_dim=16, peaked=1e-3, size_query=3.312338954538758e18,
         size_key=1.3744987140977435e22, through="output"),
    Call(seed=3, query_len=4, key_len=10, head_dim=8, offset=1000, asks_reach=True),
    Call(seed=3, key_len=0, asks_reach=True),
    Call(seed=3, query_len=0, key_len=9, asks_reach=True),
    Call(seed=7, heads=2, kv_heads=2, query_len=20, key_len=20, head_dim=33, mask="left", bad="unseen"),
    Call(seed=9, heads=2, kv_heads=2, query_len=20, key_len=20, head_dim=33, causal=False, mask="random", bad="unseen"),
    Call(seed=22392, batch=2, heads=4, kv_heads=4, query_len=64, key_len=189, head_dim=65, causal=False, slopes="negative",
         offset=52, layout_grad="packed", outlier_key=1e8),
    Call(query_len=64, key_len=189, head_dim=7, outlier_key=1e8, return_lse=False, through="output", wanted="inputs"),
    Call(seed=8937, batch=2, heads=15, kv_heads=5, query_len=129, key_len=17, head_dim=7, slopes="mixed",
         layout_grad="one number", size_query=7.31728830674571e20, size_key=9.588664751018611e-19, size_value=2.35207e18),
    Call(seed=150, query_len=2, wild_blind=True),
    Call(seed=348, heads=2, query_len=70, key_len=9, slopes="huge", wanted="slopes", wild_blind=True),
    Call(seed=74, query_len=9, key_len=0, through="lse"),
    Call(seed=5286, query_len=0, key_len=9, wanted="key"),
    Call(seed=908, dtype="float64", query_len=304, key_len=551, head_dim=6, slopes="mixed", scale=8.0, through="output"),
    Call(seed=12724, key_len=2, scale=0.0, size_key=7.553870861377767e+19, size_value=9.633475567635286e+27),
    Call(seed=27995, heads=15, kv_heads=5, query_len=14, key_len=14, scale=8.0, peaked=0.0, bad="seen"),
    Call(seed=3887, query_len=152, key_len=154, window=67, key_bias="wide"),
    Call(seed=3887, batch=2, heads=2, kv_heads=2, query_len=154, key_len=154, head_dim=16, causal=False, slopes="batch",
         right="negative", window=76, key_bias="wide", key_bias_shape="S"),
    Call(seed=5600, key_len=417, segments="sorted", key_bias="wide"),
    Call(seed=40315, batch=3, heads=4, query_len=3837, head_dim=32, slopes="mixed", slopes_as="float64", window=2**33, offset=0,
         offset_as="batch", layout_query="heads apart", peaked=30.0, outlier_key=100.0, outlier_value=10.0, through="lse",
         wanted="inputs"),
    Call(seed=56924, query_len=0, key_len=0, offset=0, offset_as="0-d", segments="sorted", wanted="inputs"),
    Call(seed=71419, heads=2, kv_heads=2, query_len=7, key_len=3073, head_dim=17, slopes="mixed", layout_value="same row",
         peaked=0.0, wanted="inputs"),
    Call(seed=91679, batch=2, heads=4, query_len=134, key_len=134, causal=False, slopes="batch", right="random", scale=1.0,
         offset=-135, mask="sparse", outlier_key=1000.0, return_lse=False, through="output"),
    Call(seed=6940, heads=4, kv_heads=2, query_len=151, key_len=151, segments="unsorted", segments_as="pair", key_bias="wide"),
    Call(seed=5999, heads=32, kv_heads=2, query_len=16, key_len=17, head_dim=20, window=2, scale=8.0, bad="seen",
         through="output", dropout_p=0.5, torch_seed=720833116),
    Call(seed=14893, dtype="float16", head_dim=3, outlier_value=1e8, dropout_p=0.1, torch_seed=1508454),
    Call(seed=43, key_len=62, through="output", gates="isolated"),
    Call(seed=43, key_len=62, gates="both"),
    Call(seed=93, key_len=3, key_bias="isolated", key_bias_as="float64"),
    Call(seed=113, query_len=2, key_len=8, key_bias="isolated"),
    Call(seed=113, batch=3, query_len=192, key_len=8, head_dim=7, causal=False, window=64, key_bias="isolated"),
    Call(seed=55, head_dim=16, layout_value="negative"),
    Call(seed=186, heads=4, kv_heads=2, query_len=11, key_len=106, head_dim=16, layout_key="imaginary", layout_grad="negative"),
    Call(seed=17, heads=2, query_len=29, key_len=12, slopes="batch", layout_masks="negative", asks_reach=True),
    Call(seed=82, batch=0, heads=10, kv_heads=5, query_len=9, key_len=9, head_dim=31),
    Call(seed=107, batch=0, query_len=104, key_len=17, causal=False, wanted="slopes", dropout_p=0.1),
    Call(seed=8304664, dtype="float16", batch=2, query_len=209, key_len=333, head_dim=65, slopes="batch", window=64,
         outlier_value=1e20, tolerance=1e-06, dropout_p=0.9, torch_seed=854680329, gates="both", gates_as="float64"),
)  # fmt: skip


@pytest.mark.parametrize("call", FOUND, ids=repr)
@pytest.mark.parametrize("backend", DRAWS)
def test_calls_that_once_failed_are_right(backend: str, call: Call) -> None:
    assert_agrees(call, backend)


@pytest.mark.parametrize("part", range(10))
def test_random_calls_are_answered_as_the_truth_has_it(part: int) -> None:
    for seeds in (range(part * 10, part * 10 + 10), range(100 + part * 10, 110 + part * 10)):
        assert_no_failures(fuzz([backend for backend, draws in DRAWS.items() if seeds.stop <= draws], seeds))


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_many_random_calls_are_answered_as_the_truth_has_it(part: int) -> None:
    assert_no_failures(fuzz([*DRAWS], range(1000 + part * 100, 1100 + part * 100)))


def assert_no_failures(tallies: dict[str, Tally]) -> None:
    failures = [f"{backend} seed {seed}: {words}" for backend, of in tallies.items() for seed, words in of.failures]
    assert not failures, "\n".join(failures)


def test_backends_that_answer_the_same_call_are_held_against_one_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Call] = []

    def counted(call: Call, numbers: Arrays, *, bits: int | None = None) -> Truth:
        asked.append(call)
        return truth(call, numbers, bits=bits)

    monkeypatch.setattr(differential_checks, "truth", counted)
    seeds = [seed for seed in range(30) if draw(seed).key_bias is None and draw(seed).dtype == "float32"][:5]
    for seed in seeds:
        assert_no_failures(fuzz(["reference", "native"], range(seed, seed + 1)))
    assert asked == [draw(seed) for seed in seeds]


def of_case(case: Case) -> tuple[Call, Arrays]:
    """A case of the conformance suite as a call in float64."""
    drawn = case.draw()
    call = Call(
        dtype="float64", batch=case.batch, heads=case.heads, kv_heads=case.kv_heads or case.heads, query_len=case.query_len,
        key_len=case.key_len, head_dim=case.head_dim, causal=case.causal, right=case.right, window=case.window,
        scale=case.scale, tolerance=0.0, key_bias=case.key_bias, key_bias_as="float64",
        key_bias_shape="BHS" if drawn["key_bias"] is None else {1: "S", 2: "HS", 3: "BHS"}[drawn["key_bias"].ndim],
    )  # fmt: skip
    of_query = drawn["query_segments"]
    if drawn["key_segments"] is not None and of_query is None:
        of_query = np.take_along_axis(drawn["key_segments"], positions(case, drawn), 1)
    names = ("query", "key", "value", "slopes", "right_slopes", "key_mask", "key_segments", "grad_output", "grad_lse")
    names += ("key_bias",)
    given = {name: drawn[name] for name in names}
    return call, Arrays(**given, query_segments=of_query, first=positions(case, drawn)[:, 0])


SLOW_LOOPS = {"key bias, long, gates", "key bias, long, gates and slopes"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.long if x.name in SLOW_LOOPS else ()) for x in (*CASES, *KEY_BIASES)],
    ids=str,
)
def test_the_truth_is_that_of_a_loop_over_queries_and_keys(case: Case) -> None:
    call, numbers = of_case(case)
    true, loop = truth(call, numbers), looped(case)
    for name, expected in ({"output": loop.output, "lse": loop.lse} | loop.gradients).items():
        exact = true.exact[name]
        np.testing.assert_allclose(
            exact, expected.numpy(), rtol=0, atol=1e-13 * max(1.0, _largest(exact)), err_msg=name
        )


@pytest.mark.parametrize("changes", [{"dropout_p": 0.5, "torch_seed": 9}, {"sinks": "noise"}], ids=str)
def test_the_truth_is_that_of_autograd(changes: dict) -> None:
    """Through a softmax whose weights are multiplied by dropout's factors, or an output times σ(lse − sink)."""
    wide = {"dtype": "float64", "key_bias_as": "float64", "slopes_as": "float64", "tolerance": 0.0}
    call = dataclasses.replace(CHECKED, **wide, **changes)
    numbers = arrays(call)
    true, plain = truth(call, numbers), plainly(call, numbers).results
    undropped = truth(dataclasses.replace(call, dropout_p=0.0), numbers)
    for name, exact in true.exact.items():
        tolerance = 1e-6 if name == "sink_logits" else 1e-12  # its gradient is fp32
        np.testing.assert_allclose(plain[name].numpy(), exact, rtol=0, atol=tolerance * _largest(exact), err_msg=name)
        assert (name == "lse" or not call.dropout_p) == np.array_equal(exact, undropped.exact[name])


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


CHECKED = Call(
    seed=5, batch=2, heads=4, kv_heads=2, query_len=19, key_len=23, head_dim=8, causal=False, right="random", window=7,
    offset=3, mask="random", segments="sorted", segments_as="pair", key_bias="noise",
)  # fmt: skip


def assert_told_apart(call: Call, numbers: Arrays, right: Answer, wrong: Iterable[Answer]) -> None:
    """The checker accepts one answer and none of the others."""
    question = Question(call, numbers)
    assert_right(question, right)
    for other in wrong:
        with pytest.raises(AssertionError):
            assert_right(question, other)


def by_reference(call: Call, numbers: Arrays, **changes: object) -> Answer:
    return answer(dataclasses.replace(call, **changes), numbers, backend="reference")


def test_the_checker_fails_on_answers_to_other_calls() -> None:
    """Another head's slopes, a window or a position off by one, another mask: only the call differs."""
    numbers = arrays(CHECKED)
    others = {
        "slopes": numbers.slopes[[1, 2, 3, 0]], "right_slopes": numbers.right_slopes[[1, 2, 3, 0]],
        "first": numbers.first + 1, "key_mask": np.roll(numbers.key_mask, 1, 1),
        "key_segments": np.roll(numbers.key_segments, 1, 1), "query_segments": np.roll(numbers.query_segments, 1, 1),
        "key": numbers.key[:, ::-1].copy(), "grad_lse": -numbers.grad_lse,
        "key_bias": numbers.key_bias[:, [1, 2, 3, 0]],
    }  # fmt: skip
    wrong = [
        by_reference(CHECKED, dataclasses.replace(numbers, **{name: x}), offset=CHECKED.offset + (name == "first"))
        for name, x in others.items()
    ]
    wrong += [by_reference(CHECKED, numbers, **changes) for changes in ({"window": 8}, {"scale": 0.36})]
    assert_told_apart(CHECKED, numbers, by_reference(CHECKED, numbers), wrong)


def test_the_checker_fails_on_another_dropout() -> None:
    """Another rate, another seed, no dropout, and a mask that is shifted by one."""
    call = dataclasses.replace(CHECKED, dropout_p=0.3, torch_seed=4)
    numbers = arrays(call)

    def shifted(query, key, value, slopes, *, dropout_p, **rest):
        made = make_spec(query, key, value, slopes, **rest, dropout_p=dropout_p)
        seed = torch.tensor([[drawn_seed(call.torch_seed), 0, 0, 1]])
        return attend(dataclasses.replace(made, dropout_seed=seed), query, key, value, "reference")

    others = ({"dropout_p": 0.31}, {"torch_seed": 5}, {"dropout_p": 0.0})
    wrong = [*(by_reference(call, numbers, **changes) for changes in others), answer(call, numbers, shifted)]
    assert_told_apart(call, numbers, by_reference(call, numbers), wrong)


def test_the_checker_fails_on_a_causal_mask_that_is_shifted() -> None:
    call = Call(seed=1, heads=2, kv_heads=1, query_len=9, key_len=9, head_dim=4)
    numbers = arrays(call)
    assert_told_apart(call, numbers, by_reference(call, numbers), [by_reference(call, numbers, offset=1)])


WITH_SINKS = dataclasses.replace(CHECKED, sinks="noise")


PARTS = ("output", "lse", "query", "key", "value", "slopes", "right_slopes", "key_bias", "sink_logits")


@pytest.mark.parametrize("name", PARTS)
def test_the_checker_fails_on_each_wrong_part(name: str) -> None:
    numbers = arrays(WITH_SINKS)
    right = answer(WITH_SINKS, numbers, backend="reference").results
    for change in (
        lambda x: _of_one_head(x, lambda head: head * (1 + 1e-2)),
        lambda x: _of_one_head(x, lambda head: head + 1e-2),
        lambda x: x.masked_fill(torch.arange(x.numel()).reshape(x.shape) == 0, float("nan")),
        lambda x: x.double(),
        lambda x: x[:1],
    ):
        wrong = change(right[name].clone())
        if "slopes" in name and wrong.dtype == torch.float64:
            continue
        with pytest.raises(AssertionError, match=name):
            assert_right(Question(WITH_SINKS, numbers), Answer(right | {name: wrong}))


def _of_one_head(x: torch.Tensor, change) -> torch.Tensor:
    at = x[1] if x.ndim == 1 else x[:, 1]
    at.copy_(torch.where(at.isfinite() & (at != 0), change(at), at))
    return x


def test_the_checker_fails_where_native_skips_more_than_the_tolerance() -> None:
    call = Call(seed=3, query_len=200, key_len=200, head_dim=8, heads=2, kv_heads=2, slopes="published", tolerance=1e-6)
    numbers = arrays(call)
    right, wrong = (answer(dataclasses.replace(call, tolerance=x), numbers, backend="native") for x in (1e-6, 0.3))
    assert_told_apart(call, numbers, right, [wrong])


@pytest.mark.parametrize("shape", ["BHS", "HS", "B1S", "S"])
@pytest.mark.parametrize("backend", ["dense", "native"])
def test_the_checker_fails_on_biases_that_lose_their_digits(backend: str, shape: str) -> None:
    """Biases rounded to integers, as in fp32 near 2²³: far from 0, and close to one another."""
    call = Call(
        seed=4, batch=2, heads=4, kv_heads=2, query_len=150, key_len=150, head_dim=16, key_bias="wide", key_bias_shape=shape,
    )  # fmt: skip
    numbers = arrays(call)
    bias = 1e6 + np.round(16 * np.random.default_rng(0).standard_normal(numbers.key_bias.shape)) / 16
    numbers = dataclasses.replace(numbers, key_bias=bias)
    rounded = dataclasses.replace(numbers, key_bias=np.round(bias))
    right, wrong = (answer(call, x, backend=backend) for x in (numbers, rounded))
    assert_told_apart(call, numbers, right, [wrong])


def test_a_key_that_a_bias_hides_is_unseen() -> None:
    call = Call(
        seed=6, batch=2, heads=4, kv_heads=2, query_len=30, key_len=30, head_dim=8, key_bias="hidden", bad="unseen"
    )
    numbers = arrays(call)
    hidden = (numbers.key_bias == -np.inf).reshape(2, 2, 2, 30).all(2)
    bad = ~np.isfinite(numbers.key).all(-1)
    assert bad.any()
    assert not (bad & ~hidden).any()
    assert not (~np.isfinite(numbers.value).all(-1) & ~hidden).any()


def test_a_call_is_reproduced_from_its_seed_and_from_its_words() -> None:
    for seed in range(50):
        call = draw(seed)
        assert call == draw(seed)
        assert eval(repr(call), {"Call": Call}) == call
        first, second = arrays(call), arrays(draw(seed))
        for field in dataclasses.fields(Arrays):
            np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name))


def test_every_feature_is_drawn() -> None:
    """Counts only the draws of the test suite."""
    calls = [draw(seed) for seed in range(DRAWS["native"])]
    drawn = {field.name: {getattr(call, field.name) for call in calls} for field in dataclasses.fields(Call)}
    assert not [name for name, found in drawn.items() if found == {getattr(Call, name)}]
    options = {
        "dtype": ("float64", "bfloat16", "float16"), "slopes": ("published", "batch", "zero", "negative", "steep negative",
        "huge", "enormous", "extreme", "vanishing", "mixed"), "right": ("batch", "inf", "zero", "negative", "steep"),
        "mask": ("random", "left", "right"), "segments": ("sorted", "unsorted"), "segment_ids": ("negative", "large"),
        "offset_as": ("0-d", "batch"), "bad": ("unseen", "seen"), "through": ("output", "lse"), "wanted": ("inputs", "none"),
        "key_bias": KINDS, "key_bias_as": ("float64",), "key_bias_shape": ("HS", "B1S", "S"),
        "gates": GATES, "gates_as": ("float64",), "gates_shape": ("BKS",), "sinks": SINKS,
    }  # fmt: skip
    assert not {name: set(of) - drawn[name] for name, of in options.items() if not set(of) <= drawn[name]}
    assert {0, 1} <= drawn["batch"]
    assert 1 in drawn["query_len"]
    assert max(drawn["query_len"] | drawn["key_len"]) >= 700
    assert max(abs(offset) for offset in drawn["offset"] - {None}) > 10_000
    assert any(size % 2 for size in drawn["head_dim"])
    assert {"negative", "imaginary"} & (drawn["layout_query"] | drawn["layout_key"] | drawn["layout_value"])
    assert any(call.group > 1 for call in calls)
    assert any(call.query_len > call.key_len for call in calls)


def test_a_failing_call_is_made_plain() -> None:
    def fails(call: Call) -> bool:
        return call.window is not None and call.query_len > 3

    found = shrunk(
        Call(seed=1, dtype="float64", heads=6, kv_heads=3, query_len=40, key_len=9, window=4, mask="left"), fails
    )
    assert found == Call(seed=1, query_len=5, window=1)
