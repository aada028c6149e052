"""Tests what is read of the bytes of a codec's state."""

import struct

import pytest

from thalweg._attach import _codec_states


def parameter(name, rounds, factor, residual, shard_residual=()):
    text = name.encode()
    values = [*factor, *residual, *shard_residual]
    sizes = struct.pack("<4Q", rounds, len(factor), len(residual), len(shard_residual))
    floats = struct.pack(f"<{len(values)}f", *values)
    return struct.pack("<I", len(text)) + text + sizes + floats


def state(*parameters):
    return b"TWS3" + struct.pack("<I", len(parameters)) + b"".join(parameters)


def test_counts_and_factors_stay_and_what_is_held_back_goes():
    whole = state(
        parameter("ä.weight", 7, [1.0, 2.0], [3.0] * 4, [4.0] * 4),
        parameter("b", 9, [], [5.0]),
    )
    thin = state(parameter("ä.weight", 7, [1.0, 2.0], []), parameter("b", 9, [], []))
    assert _codec_states.without_residuals(whole) == thin
    assert _codec_states.without_residuals(thin) == thin
    assert _codec_states.rounds_of(whole) == _codec_states.rounds_of(thin) == 9
    assert _codec_states.rounds_of(state()) == 0


def test_what_one_state_holds_back_is_put_to_counts_and_factors_of_another():
    old = state(parameter("a", 7, [1.0], []), parameter("b", 8, [], [9.0]))
    new = state(parameter("b", 9, [], [6.0], [7.0]), parameter("a", 8, [2.0], [3.0, 4.0]))
    both = state(parameter("a", 7, [1.0], [3.0, 4.0]), parameter("b", 8, [], [6.0], [7.0]))
    assert _codec_states.with_residuals(old, new) == both
    with pytest.raises(ValueError, match="of different parameters"):
        _codec_states.with_residuals(old, state(parameter("a", 8, [2.0], [])))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (b"TWS2" + bytes(4), "no codec state of this release"),
        (b"TW", "cut off"),
        (state(parameter("a", 1, [1.0], []))[:-1], "expected"),
        (state(parameter("a", 1, [1.0], [])) + b"\0", "expected"),
        (b"TWS3" + struct.pack("<II", 2, 1 << 31), "cut off"),
    ],
)
def test_bytes_that_are_no_state_are_refused(broken, said):
    with pytest.raises(ValueError, match=said):
        _codec_states.without_residuals(broken)
