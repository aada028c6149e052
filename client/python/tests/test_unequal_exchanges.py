"""Tests what is said where workers are in different exchanges, without servers."""

import pytest

from thalweg.ps._plan import Plan
from thalweg.ps._step_settings import StepSettings
from thalweg.ps._unequal import explained, mark_of

ALIKE = "all workers do equally many steps, and call finish() alike"
TOLD = [
    ("node 0 gives settings 3 with grad_squares 1, node 1 with 0", "some workers are in finish()"),
    ("bucket 0 was submitted it with settings 1 and 2", "some workers are in finish()"),
    ("node 1 left while round 3 of bucket 0 waited for it", "node 1 left while round 3"),
]


@pytest.mark.parametrize(("error", "begin"), TOLD)
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_error_of_workers_in_different_exchanges_says_what_they_must_do(error, begin, kind):
    with pytest.raises(RuntimeError) as told, explained(), explained():
        raise kind(f"thalweg: {error}")
    text = str(told.value)
    assert text.startswith(f"thalweg: {begin}")
    assert (text.count(error), text.count(ALIKE)) == (1, 1)


@pytest.mark.parametrize("error", [RuntimeError("thalweg: closed"), KeyError("left while round")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as told, explained():
        raise error
    assert told.value is error


class Session:
    def __init__(self):
        self.announced = []

    def set_settings(self, number, settings, **of_all):
        self.announced.append((number, of_all))


@pytest.mark.parametrize(
    ("fragments", "delay", "numbers"),
    [
        *((1, 0, [1, 2, 3, 4]), (1, 99, [1, 2, 3, 4])),
        *((100, 0, [1, 2, 3, 4]), (100, 31, [1, 2, 3, 4]), (50, 63, [1, 2, 3, 4])),
        (100, 32, [1, 1, 2, 2]),  # shards would not keep all of an exchange each
    ],
)
def test_exchanges_of_finish_never_have_the_settings_of_those_of_steps(fragments, delay, numbers):
    plan = Plan(100, fragments, delay, 0.0, False)
    session = Session()
    kind = type("Kind", (), {"settings": (), "measures": False})
    steps = StepSettings(session, kind, [], 0)
    found = []
    for ends in (False, False, True, True):
        mark = mark_of(plan, ends=ends)
        if not steps.are([{}], **mark):
            steps.announce([{}], **mark)
        found.append(steps.number)
    assert found == numbers
    ends = [of_all["grad_squares"] for _, of_all in session.announced]
    assert ends == [0.0] * (len(ends) // 2) + [1.0] * (len(ends) // 2)
