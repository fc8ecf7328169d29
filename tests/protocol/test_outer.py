"""The outer optimizer against torch, NumPy and arithmetic by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.protocol import outer
from stretto.protocol.codecs import get_codec
from stretto.protocol.digest import digest
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.outer import Vector


def ulps(a: Vector, b: Vector, *terms: Vector) -> float:
    """Largest distance of a and b in units in the last place of the largest of themselves and ``terms``.

    torch fuses products into sums. Where the terms of a sum cancel, the rounding that it saves is a unit of the terms,
    which is many units of the small result.
    """
    unit = np.spacing(np.abs(np.stack([a, b, *terms])).max(axis=0))
    return float((np.abs(a - b) / unit).max())


def torch_nesterov(anchor: Vector, momentum: Vector, gradient: Vector, lr: float, mu: float) -> tuple[Vector, Vector]:
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    parameter.grad = torch.from_numpy(gradient.copy())
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=True)
    sgd.state[parameter]["momentum_buffer"] = torch.from_numpy(momentum.copy())
    sgd.step()
    return parameter.detach().numpy(), sgd.state[parameter]["momentum_buffer"].numpy()


def test_nesterov_equals_torch_sgd_over_20_steps_to_one_ulp() -> None:
    random = np.random.default_rng(0)
    # weights are larger than the steps on them, as in training: see ulps() for what cancellation would do
    anchor = (random.uniform(1, 2, size=4096) * random.choice([-1, 1], size=4096)).astype(np.float32)
    momentum = np.zeros_like(anchor)
    for _ in range(20):
        gradient = (0.01 * random.normal(size=anchor.size)).astype(np.float32)
        # each step from the same state, so that differences of one step do not add up
        expected = torch_nesterov(anchor, momentum, gradient, lr=0.4, mu=0.9)
        before = anchor, momentum
        anchor, momentum = outer.nesterov(anchor, momentum, gradient, lr=0.4, momentum_factor=0.9)
        assert ulps(momentum, expected[1], before[1], gradient) <= 1
        assert ulps(anchor, expected[0]) <= 1


def test_nesterov_is_separately_rounded_products_and_sums() -> None:
    random = np.random.default_rng(1)
    anchor, momentum, gradient = random.normal(size=(3, 1000)).astype(np.float32)
    new_anchor, new_momentum = outer.nesterov(anchor, momentum, gradient, lr=0.4, momentum_factor=0.9)
    mu, lr = np.float32(0.9), np.float32(0.4)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(np.float64)

    # products of two float32 are exact in float64; sums of two are rounded once more, harmlessly at these sizes
    b = rounded(rounded(momentum.astype(np.float64) * mu) + gradient)
    step = rounded(rounded(rounded(b * mu) + gradient) * lr)
    assert new_momentum.tobytes() == b.astype(np.float32).tobytes()
    assert new_anchor.tobytes() == rounded(anchor - step).astype(np.float32).tobytes()


def test_nesterov_golden_digest() -> None:
    # the same bits on every machine: integers and powers of two only feed the inputs
    n = np.arange((1 << 18) + 3, dtype=np.float32)  # more than a chunk
    anchor, momentum, gradient = n % 7 - 3, n % 5 / 8, n % 11 / 16 - 0.25
    result = outer.nesterov(anchor, momentum, gradient, lr=0.4, momentum_factor=0.9)
    # BLAKE2b, as these bits were recorded
    expected = "ff6d5089f9e082545406c9f1df73181ed4521c85bf0289faa1f8f6b94af93e8f"
    assert digest("state", [array.data for array in result]).hex() == expected


def test_nesterov_leaves_its_inputs() -> None:
    anchor, momentum, gradient = (np.full(3, x, np.float32) for x in (1.0, 2.0, 3.0))
    outer.nesterov(anchor, momentum, gradient, lr=0.5, momentum_factor=0.5)
    assert (anchor[0], momentum[0], gradient[0]) == (1.0, 2.0, 3.0)


def test_nesterov_by_hand() -> None:
    one = np.ones(1, np.float32)
    anchor, momentum = outer.nesterov(8 * one, 2 * one, 1 * one, lr=0.5, momentum_factor=0.5)
    # b = 0.5 * 2 + 1 = 2; anchor = 8 - 0.5 (1 + 0.5 * 2)
    assert (float(anchor[0]), float(momentum[0])) == (7.0, 2.0)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_merge_equals_numpy(alpha: float) -> None:
    random = np.random.default_rng(2)
    local, anchor = random.normal(size=(2, 1000)).astype(np.float32)
    merged = outer.merge(local, anchor, alpha)
    expected = np.float32(alpha) * local + np.float32(1 - alpha) * anchor
    assert merged.dtype == np.float32
    assert merged.tobytes() == expected.astype(np.float32).tobytes()
    exact = {0.0: anchor, 1.0: local}.get(alpha)
    assert exact is None or merged.tobytes() == exact.tobytes()
    merged[:] = 0  # a new array in every case
    assert local.any()
    assert anchor.any()


def test_alpha_one_keeps_what_alpha_zero_would_lose_even_where_nothing_is_finite() -> None:
    infinite, one = np.full(2, np.inf, np.float32), np.ones(2, np.float32)
    assert outer.merge(one, infinite, 1.0).tolist() == [1.0, 1.0]
    assert outer.merge(infinite, one, 0.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("tokens", "shares"),
    [
        ([7], [1.0]),
        ([1, 1], [0.5, 0.5]),
        ([100, 300], [0.25, 0.75]),
        ([0, 0, 0, 0], [0.25] * 4),
        # the median is 10, so 1000 counts as 40: 10 + 10 + 40
        ([10, 10, 1000], [1 / 6, 1 / 6, 4 / 6]),
        # a median of zero bounds nothing
        ([0, 0, 6], [0.0, 0.0, 1.0]),
    ],
)
def test_shares_by_tokens(tokens: list[int], shares: list[float]) -> None:
    assert outer.coefficients(tokens) == pytest.approx(shares, rel=1e-7)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=256))
def test_shares_sum_to_one_and_are_bounded(tokens: list[int]) -> None:
    shares = outer.coefficients(tokens)
    assert float(sum(map(float, shares))) == pytest.approx(1.0, abs=1e-5)
    assert min(shares) >= 0


@pytest.mark.parametrize("tokens", [[], [3, -1]])
def test_shares_of_nothing_are_a_bug_here(tokens: list[int]) -> None:
    with pytest.raises(LocalProtocolError, match="token weights must be counts"):
        outer.coefficients(tokens)


@pytest.mark.parametrize(
    ("norms", "clips"),
    [
        ([], [1.0, 1.0, 1.0]),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        # the bound is 8 times the median
        ([1.0, 2.0, 16.0], [1.0, 1.0, 1.0]),
        ([1.0, 2.0, 32.0], [1.0, 1.0, 0.5]),
        ([1e30, 1.0, 1.0], [8e-30, 1.0, 1.0]),
        # small ones are not enlarged, and a group that mostly contributes nothing bounds nobody
        ([1e-9, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 5.0], [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
    ],
)
def test_a_norm_far_above_the_median_is_clipped(norms: list[float], clips: list[float]) -> None:
    assert outer.clips(norms, 3) == pytest.approx(clips, rel=1e-12)
    shares = outer.coefficients([100, 100, 100], norms)
    assert shares == pytest.approx([clip / 3 for clip in clips], rel=1e-7)


def test_one_peer_that_diverged_moves_the_average_no_further_than_its_clipped_norm() -> None:
    codec = get_codec("fp32")
    vectors = [np.eye(4, dtype=np.float32)[i] for i in range(4)]
    vectors[3] *= np.float32(1e15)
    norms = [outer.norm(vector) for vector in vectors]
    average = outer.weighted_average([codec.encode(v) for v in vectors], [1] * 4, codec, 4, norms=norms)
    assert average.tolist() == pytest.approx([0.25, 0.25, 0.25, outer.NORM_BOUND / 4])


@given(st.floats(0, 1e30), st.floats(0, 1e30), st.integers(0, 2**40), st.integers(0, 2**40))
def test_in_a_group_of_two_a_small_norm_never_clips_the_other(
    first: float, second: float, tokens: int, more: int
) -> None:
    # the median of two is their mean, and neither is more than twice that
    assert outer.clips([first, second], 2) == [1.0, 1.0]
    assert outer.coefficients([tokens, more], [first, second]) == outer.coefficients([tokens, more])


@given(st.lists(st.just(0.0) | st.floats(1e-30, 1e30), min_size=1, max_size=40))
def test_clips_bound_every_norm_and_enlarge_none(norms: list[float]) -> None:
    clips, median = outer.clips(norms, len(norms)), sorted(norms)
    middle = (median[len(norms) // 2] + median[(len(norms) - 1) // 2]) / 2
    assert all(0 < clip <= 1 for clip in clips)
    assert middle == 0 or all(
        clip * size <= outer.NORM_BOUND * middle * 1.000001 for clip, size in zip(clips, norms, strict=True)
    )


def test_norms_and_tokens_are_of_as_many_peers() -> None:
    with pytest.raises(ValueError, match="zip"):
        outer.coefficients([1, 2, 3], [1.0, 1.0])


def test_norm_is_the_l2_norm_over_chunks() -> None:
    vector = np.full(outer.CHUNK + 7, 0.5, np.float32)
    assert outer.norm(vector) == pytest.approx(0.5 * (outer.CHUNK + 7) ** 0.5, rel=1e-6)
    assert outer.norm(np.array([3.0, -4.0], np.float32)) == 5.0
    assert outer.norm(np.zeros(0, np.float32)) == 0.0
    assert outer.norm(np.array([1.0, np.inf], np.float32)) == np.inf
    assert outer.norm(np.array([1.0, np.nan], np.float32)) == np.inf


def test_average_is_the_sum_in_the_given_order() -> None:
    random = np.random.default_rng(3)
    codec = get_codec("fp32")
    vectors = [(scale * random.normal(size=100)).astype(np.float32) for scale in (1.0, 1e-3, 1e3)]
    tokens = [100, 200, 300]
    average = outer.weighted_average([codec.encode(v) for v in vectors], tokens, codec, 100)
    expected = np.zeros(100, np.float32)
    for share, vector in zip((np.float32(1 / 6), np.float32(1 / 3), np.float32(1 / 2)), vectors, strict=True):
        expected = expected + share * vector
    assert average.tobytes() == expected.tobytes()


def test_average_refuses_a_payload_of_the_wrong_length() -> None:
    codec = get_codec("fp32")
    with pytest.raises(RemoteProtocolError):
        outer.weighted_average([codec.encode(np.zeros(9, np.float32))], [1], codec, 10)


def test_outer_gradient_points_from_the_local_weights_to_the_anchor() -> None:
    gradient = outer.outer_gradient(np.array([3.0, 1.0], np.float32), np.array([1.0, 4.0], np.float32))
    assert gradient.tolist() == [2.0, -3.0]
    assert gradient.dtype == np.float32
