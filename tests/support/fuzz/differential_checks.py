"""Runs a call on a backend and compares it with the truth; test_differential_fuzz proves that every check can fail."""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from attention_checks import plain_attention
from differential_arrays import GATE_FLOOR, Arrays, arrays, beside, gates_of, key_bias_of, laid_out, seen_keys
from differential_biases import relative_biases
from differential_calls import INPUTS, Call, lse_dtype, settled, slopes_dtype, wanted
from differential_truth import Truth, dropout_factors, finite_rows, truth
from torch import Tensor

from alibi_attn.attention.api import alibi_attention, explain, head_reach
from alibi_attn.attention.forgetting import forgetting_attention

WITHOUT_KEY_BIAS, WITHOUT_DROPOUT = ("banded",), ("banded", "flex")


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """Results by name: the output, and lse and gradients if they were requested."""

    results: dict[str, Tensor]


def arguments(call: Call, numbers: Arrays) -> dict[str, object]:
    """The keywords of alibi_attention, or of forgetting_attention if there are gates, with the drawn strides."""
    dtype, whole = getattr(torch, call.dtype), getattr(torch, call.integers)
    inputs = {x: laid_out(getattr(numbers, x), getattr(call, f"layout_{x}"), dtype) for x in INPUTS[:3]}
    offset: int | Tensor | None = call.offset
    if call.offset is not None and call.offset_as != "int":
        offset = torch.tensor(numbers.first if call.offset_as == "batch" else call.offset).to(whole)
    segments: Tensor | tuple[Tensor, Tensor] | None = None
    if numbers.key_segments is not None:
        segments = beside(numbers.key_segments, call.layout_masks, whole)
        if call.segments_as == "pair":
            segments = beside(numbers.query_segments, call.layout_masks, whole), segments
    mask = numbers.key_mask
    if call.value_is_key:
        inputs["value"] = inputs["key"]
    if call.gates is not None:
        inputs["log_fgate"] = gates_of(call, numbers)
    else:
        right = None if numbers.right_slopes is None else _slopes(call, numbers.right_slopes)
        inputs |= {"causal": call.causal, "right_slopes": right}
    return inputs | {
        "slopes": None if call.slopes_as == "none" else _slopes(call, numbers.slopes),
        "window": call.window,
        "scale": call.scale,
        "query_offset": offset,
        "key_mask": None if mask is None else beside(mask, call.layout_masks, torch.bool),
        "segment_ids": segments,
        "tolerance": call.tolerance,
        "return_lse": call.return_lse,
        "key_bias": key_bias_of(call, numbers),
        "dropout_p": call.dropout_p,
        "sink_logits": None if numbers.sink_logits is None else torch.tensor(numbers.sink_logits, dtype=torch.float32),
    }


def answerable(call: Call, backend: str) -> Call:
    """The call without the features that a backend does not support."""
    if backend in WITHOUT_KEY_BIAS:
        call = dataclasses.replace(call, key_bias=None, gates=None)
    if backend in WITHOUT_DROPOUT:
        call = dataclasses.replace(call, dropout_p=0.0)
    if backend == "flex":  # on a CPU it has no lse, no gradients and no fp64
        dtype = "float32" if call.dtype == "float64" else call.dtype
        rest = {"wanted": "none" if call.wanted != "inference" else "inference", "value_is_key": False}
        call = dataclasses.replace(call, dtype=dtype, return_lse=False, through="output", sinks=None, **rest)
    return settled(call)


def answer(call: Call, numbers: Arrays, attention=None, **extra: object) -> Answer:
    """Output, lse and the requested gradients; the inputs must be unchanged afterwards."""
    attention = attention or (alibi_attention if call.gates is None else forgetting_attention)
    given = arguments(call, numbers)
    tensors = [x for entry in given.values() for x in (entry if isinstance(entry, tuple) else (entry,))]
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    before = [x.clone() for x in tensors]
    threads = torch.get_num_threads()
    torch.set_num_threads(call.threads)
    try:
        results = _answered(call, numbers, given, functools.partial(attention, **extra))
    finally:
        torch.set_num_threads(threads)
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(old.nan_to_num(), new.detach().nan_to_num()), "an argument has been written to"
    return Answer(results)


def _answered(call: Call, numbers: Arrays, given: dict, attention) -> dict[str, Tensor]:
    leaves = {x: given[x] for x in wanted(call)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    inference, kept_generator = torch.inference_mode(call.wanted == "inference"), torch.random.fork_rng(devices=[])
    with inference, torch.set_grad_enabled(bool(leaves)), kept_generator:
        torch.manual_seed(call.torch_seed)
        found = attention(**given)
    output, lse = found if call.return_lse else (found, None)
    results = {"output": output.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if not leaves:
        return results
    outputs, grads = [], []
    if call.through != "lse":
        outputs.append(output)
        grads.append(_grad_output(call, numbers))
    if call.through != "output" and set(leaves) != {"sink_logits"}:  # lse excludes the sinks
        outputs.append(lse)
        grads.append(beside(_wild(call, numbers, numbers.grad_lse), call.layout_masks, lse.dtype))
    gradients = [None] * len(leaves)
    if outputs:
        gradients = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    return results | {
        x: torch.zeros_like(leaves[x]) if g is None else g for x, g in zip(leaves, gradients, strict=True)
    }


class Question:
    """A call, its numbers and their truth, shared by all backends."""

    def __init__(self, call: Call, numbers: Arrays | None = None) -> None:
        self.call, self.numbers = call, arrays(call) if numbers is None else numbers
        self._truths: dict[int | None, Truth] = {}

    def truth(self, bits: int | None = None) -> Truth:
        if bits not in self._truths:
            self._truths[bits] = truth(self.call, self.numbers, bits=bits)
        return self._truths[bits]


def assert_agrees(question: Question | Call, backend: str) -> dict[str, float]:
    """Asserts that results match the truth; returns each result's largest error as a share of the allowed one."""
    if isinstance(question, Call):
        question = Question(answerable(question, backend))
    call, numbers = question.call, question.numbers
    got = answer(call, numbers, backend=backend)
    if call.is_repeated:
        again = answer(call, numbers, backend=backend).results
        for name, result in got.results.items():
            same = torch.equal(result.nan_to_num(), again[name].nan_to_num())
            assert same, f"{name} has other bits when the call is repeated"
    if call.asks_reach:
        assert_reach(question, backend)
    return assert_right(question, got, bits=_bits(call, backend))


def assert_reach(question: Question, backend: str) -> None:
    """Asserts that keys at `head_reach` or beyond weigh at most the tolerance, and that `explain` returns text."""
    call, numbers = question.call, question.numbers
    given = arguments(call, numbers)
    assert str(explain(**given, backend=backend)).startswith("B=")
    del given["value"]
    reach = head_reach(**given, backend=backend)
    assert reach.shape == (call.batch, call.heads), f"head_reach has shape {list(reach.shape)}"
    assert reach.dtype == torch.int64, f"head_reach is {reach.dtype}"
    if call.query_len == 0 or call.key_len == 0:
        return
    far = np.abs(numbers.distance())[:, None] >= reach.numpy()[:, :, None, None]
    shares = (question.truth().weights * far).sum(-1)
    if call.bad == "seen":  # the largest numbers have no finite weights, not even in fp64
        shares = shares[np.isfinite(shares)]
    beyond = float(shares.max(initial=0.0))
    assert beyond <= call.share * (1 + 1e-6) + 1e-15, f"keys beyond head_reach weigh {beyond:.3g}, not {call.share:.3g}"


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def assert_right(question: Question, got: Answer, *, bits: int | None = None) -> dict[str, float]:
    """Asserts that all errors stay within the bounds of rounding and skipping, or within twice plain PyTorch's.

    If inputs are so huge that their products overflow fp32, a result must be finite if plain PyTorch's is; the same
    holds in fp16, whose largest number is 65,504, and if some queries see bad numbers. `bits` is the accuracy of a less
    accurate exponential; a result that passes with the usual accuracy is compared with that.
    """
    call, numbers, true = question.call, question.numbers, question.truth()
    plain: dict[str, Tensor] = {}
    names = ["output", *(["lse"] if call.return_lse else []), *wanted(call)]
    expected_dtype = dict.fromkeys(("output", *INPUTS[:3]), call.dtype)
    expected_dtype |= {
        "lse": lse_dtype(call),
        "key_bias": call.key_bias_as,
        "log_fgate": call.gates_as,
        "sink_logits": "float32",
    }
    shares: dict[str, float] = {}
    for name in names:
        result, exact = got.results[name], true.exact[name]
        assert tuple(result.shape) == exact.shape, f"{name} has shape {list(result.shape)}, not {list(exact.shape)}"
        if name in expected_dtype:
            assert result.dtype == getattr(torch, expected_dtype[name]), f"{name} is {result.dtype}"
        ours = result.double().numpy()
        checked = _checked(call, numbers, true, name)
        if name == "lse":
            blind = ~true.seen.any(-1)
            assert (ours[blind & checked] == -math.inf).all(), "lse of a query that sees nothing is not −inf"
            checked = checked & ~blind
        _assert_silence(question, name, ours)
        most = torch.finfo(result.dtype).max
        for exponential in dict.fromkeys((None, bits)):
            found = ours, exact, question.truth(exponential).error[name]
            shares[name], wrong = _share(*found, checked, most)
            if not wrong.any():
                break
        else:
            beside = _beside_plain(question, name, found, (checked, wrong), plain, most)
            shares[name] = max(shares[name], beside)
    return shares


def _assert_silence(question: Question, name: str, ours: np.ndarray) -> None:
    """Asserts zeros for queries that see nothing and keys that no query sees, NaN for queries that see NaN."""
    call, numbers, true = question.call, question.numbers, question.truth()
    if name == "output" and call.bad == "seen":
        silent = _poisoned(call, numbers, true, np.isnan) & np.isfinite(ours).all(-1)
        assert not silent.any(), "a query that sees NaN is answered as if it did not"
    if name in ("output", "query"):
        assert (ours[~true.seen.any(-1)] == 0).all(), f"{name} of a query that sees nothing is not zero"
    if call.is_huge or call.bad == "seen":
        return
    if name == "key_bias":
        assert (ours[numbers.key_bias == -np.inf] == 0).all(), "the gradient of a bias of −inf is not zero"
    if name == "log_fgate":
        assert (ours[numbers.log_fgate < GATE_FLOOR] == 0).all(), "the gradient of a closed gate is not zero"
    if name in ("key", "value"):
        unseen = ~seen_keys(call, true.seen)
        assert (ours[unseen] == 0).all(), f"the gradient of a {name} that no query may see is not zero"


def _share(
    ours: np.ndarray, exact: np.ndarray, error: np.ndarray, checked: np.ndarray, most: float
) -> tuple[float, np.ndarray]:
    """Returns (the largest accepted error as a share of the allowed error; a mask of larger errors)."""
    off = np.abs(np.subtract(ours, exact, out=np.zeros_like(exact), where=checked))
    inside = checked & (np.abs(exact) + error < most)  # beyond it, the dtype may overflow
    wrong = inside & ~(off <= error)
    fits = inside & (error > 0) & ~wrong
    return float((off[fits] / error[fits]).max(initial=0.0)), wrong


def _beside_plain(question: Question, name: str, found: tuple, where: tuple, plain: dict, most: float) -> float:
    """Returns the largest error as a share of the allowed one, given plain PyTorch's result; raises if it is too large."""
    call, (ours, exact, error), (checked, wrong) = question.call, found, where
    if not plain:
        plain.update(plainly(call, question.numbers).results)
    theirs = plain[name].double().numpy()
    fine = np.isfinite(theirs)
    if call.is_huge or call.dtype == "float16" or call.bad == "seen":
        wrong &= fine
    may_leave = call.is_huge or (call.dtype == "float16" and call.dropout_p > 0)
    if may_leave and name in INPUTS and not bool(plain["output"].isfinite().all()):
        return 0.0  # scores overflowed fp32, or a value times 1 / (1 − p) fp16; the gradients are then undefined
    inside = fine & checked & (np.abs(exact) + error < most)
    apart = np.abs(np.subtract(theirs, exact, out=np.zeros_like(exact), where=inside))
    axes = tuple(range(2, apart.ndim))
    allowed = error + 2 * (apart.max(axes, keepdims=True) if axes else apart.max(initial=0.0))
    off = np.abs(np.subtract(ours, exact, out=np.zeros_like(exact), where=wrong))
    still = wrong & ~(off <= allowed)
    if still.any():
        excess = np.where(still, np.where(np.isfinite(ours), off / allowed, np.inf), 0.0)
        worst = np.unravel_index(np.argmax(excess), off.shape)
        at = list(map(int, worst))
        raise AssertionError(
            f"{name} is {ours[worst]:.8g} at {at} but should be {exact[worst]:.8g} ± {allowed[worst]:.2g} "
            f"(rounding {error[worst]:.2g}; plain PyTorch {theirs[worst]:.8g}); {int(still.sum())} of {still.size} wrong"
        )
    return float((off[wrong] / allowed[wrong]).max(initial=0.0))


def _bits(call: Call, backend: str) -> int | None:
    """Accuracy in bits of the exponential in torch's fused CPU operator: in bf16 it is 13, from 16 keys on."""
    if backend not in ("banded", "dense") or call.dtype == "float64":
        return None
    return 13 if call.dtype == "bfloat16" else 20


def plainly(call: Call, numbers: Arrays) -> Answer:
    """Eager PyTorch in the call's dtype, with hidden entries of the inputs cleared."""
    seen = numbers.seen(call)
    used = seen_keys(call, seen)
    clean = {x: np.where(used[..., None], finite_rows(getattr(numbers, x)), 0.0) for x in ("key", "value")}
    clean["query"] = np.where(seen.any(-1)[..., None], finite_rows(numbers.query), 0.0)
    given = dataclasses.replace(numbers, **clean)
    call = dataclasses.replace(
        call,
        wild_blind=False,
        return_lse=True,
        slopes_as="float64" if call.slopes_as == "none" else call.slopes_as,
        **{f"layout_{x}": "contiguous" for x in INPUTS[:3]},
    )

    kept = dropout_factors(call, numbers)

    biases = relative_biases(call, numbers, seen)

    def attention(*, sink_logits, **given):
        output, lse = without_sinks(**given)
        if sink_logits is not None:
            blind = lse == -math.inf
            share = torch.sigmoid(lse.masked_fill(blind, 0.0) - sink_logits.to(lse.dtype)[:, None]).masked_fill(
                blind, 0.0
            )
            output = (output * share[..., None]).to(output.dtype)
        return output, lse

    def without_sinks(*, tolerance, return_lse, slopes, key_bias, dropout_p, right_slopes=None, log_fgate=None, **rest):
        wide = torch.float64 if call.dtype == "float64" else torch.float32
        if kept is not None:
            rest["kept"] = torch.from_numpy(kept).to(wide)
        slopes = torch.as_tensor(slopes, dtype=wide)
        right = None if right_slopes is None else torch.as_tensor(right_slopes, dtype=wide)
        if right is not None:  # inf·0 is NaN
            rest["right_slopes"] = right
        if log_fgate is not None:
            rest["causal"] = True
        if biases is None:
            return plain_attention(slopes=slopes, **rest)
        # Relative to the query's best key, as careful users write it; the tensors are included for their gradients.
        relative = torch.from_numpy(np.where(seen, biases.relative, -np.inf)).to(wide)
        for_gradients = torch.zeros(call.batch, call.heads, call.query_len, call.key_len, dtype=wide)
        if key_bias is not None:
            finite = torch.where(key_bias > -math.inf, key_bias, 0).expand(call.batch, call.heads, call.key_len)
            for_gradients = for_gradients + (finite - finite.detach())[:, :, None]
        if log_fgate is not None:
            finite = torch.where(log_fgate > -math.inf, log_fgate, 0).repeat_interleave(
                call.heads // log_fgate.shape[1], 1
            )
            sums = (finite - finite.detach()).cumsum(-1)
            of_queries = sums[..., numbers.first[0] if call.batch else 0 :][..., : call.query_len]
            for_gradients = for_gradients + of_queries[..., None] - sums[:, :, None]
        output, lse = plain_attention(slopes=slopes, key_bias=relative + for_gradients, **rest)
        return output, lse + torch.from_numpy(biases.of_best).to(lse.dtype)

    return answer(call, given, attention)


def _poisoned(call: Call, numbers: Arrays, true: Truth, is_bad: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[B, H, T]: the queries that are bad themselves or see a bad key or value."""
    bad = is_bad(numbers.key).any(-1) | is_bad(numbers.value).any(-1)
    sees = (true.seen & np.repeat(bad, call.group, 1)[:, :, None]).any(-1)
    return sees | (is_bad(numbers.query).any(-1) & true.seen.any(-1))


LEAST_LOSS = 2.0**-22  # the least allowed error as a share of a sum's magnitudes: four units of fp32


def _may_overflow(call: Call, numbers: Arrays, true: Truth) -> np.ndarray:
    """[B, H, T]: the queries for which the magnitudes of some score's terms sum to more than fp32 holds."""
    query, key = (np.nan_to_num(np.abs(x.astype(np.float64)), nan=0.0) for x in (numbers.query, numbers.key))
    sums = abs(call.factor) * np.einsum("bhtd,bhsd->bhts", query, np.repeat(key, call.group, 1))
    return ((sums > 0.99 * float(np.finfo(np.float32).max)) & true.seen).any(-1)


def _checked(call: Call, numbers: Arrays, true: Truth, name: str) -> np.ndarray:
    """Returns a mask of the numbers to compare.

    Excluded are queries that see NaN, inf or the largest number, or whose scores overflow in some order of summation;
    gradients of keys from such queries; and gradients that overflow in some order.
    """
    exact = true.exact[name]
    of_queries = name in ("output", "lse", "query")
    if call.bad == "seen":
        most = torch.finfo(getattr(torch, call.dtype)).max
        fine = of_queries & ~_poisoned(call, numbers, true, lambda x: ~(np.abs(x) < most))
        terms = np.ones(exact.shape, bool)
    elif call.is_huge:
        fine = ~_may_overflow(call, numbers, true)
        terms = np.abs(exact) + true.error[name] / LEAST_LOSS < torch.finfo(torch.float32).max
    else:
        return np.ones(exact.shape, bool)
    if not of_queries:
        return terms & bool(fine.all())
    return terms & (fine[..., None] if exact.ndim == 4 else fine)


def _slopes(call: Call, numbers: np.ndarray) -> Tensor | list:
    if call.slopes_as == "list":
        return numbers.tolist()
    return beside(numbers, call.layout_masks, getattr(torch, slopes_dtype(call)))


def _grad_output(call: Call, numbers: Arrays) -> Tensor:
    dtype = getattr(torch, call.dtype)
    if call.layout_grad in ("zero", "one number"):
        number = 1.0 if call.layout_grad == "one number" else 0.0
        return torch.tensor(number, dtype=dtype).expand(numbers.grad_output.shape)
    return laid_out(_wild(call, numbers, numbers.grad_output), call.layout_grad, dtype)


def _wild(call: Call, numbers: Arrays, grad: np.ndarray) -> np.ndarray:
    """Sets NaN for queries that see nothing, if no stride is 0."""
    if not call.wild_blind or call.layout_grad.startswith("same") or call.layout_masks == "same batch":
        return grad
    blind = ~numbers.seen(call).any(-1)
    return np.where(blind[..., None] if grad.ndim == 4 else blind, math.nan, grad)
