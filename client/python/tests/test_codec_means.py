"""Tests what means in the codec of a job's session go on from, without servers."""

from types import SimpleNamespace

import pytest

from thalweg._attach import _codec_states
from thalweg.ps import _means

pytestmark = pytest.mark.usefixtures("lone_group")
OF_SIGNS = {"codec": "signs:parts=4", "saved_by": "rank 0 of 2", "turns": {}}


@pytest.fixture
def means(monkeypatch):
    """Returns those of the first of two nodes."""
    monkeypatch.setattr(_means._buckets, "make", lambda *_: [])
    loaded = []
    session = SimpleNamespace(
        load_codec_state=loaded.append, save_codec_state=_codec_states.nothing, loaded=loaded
    )
    place = SimpleNamespace(local_rank=0, num_nodes=2, node=0)
    job = SimpleNamespace(session=session, place=place, workers=[SimpleNamespace(codec="int8")] * 2)
    made = _means.CodecMeans(job, None, [])
    return SimpleNamespace(load=made.load, state=made.state, loaded=loaded)


@pytest.mark.parametrize(("held", "warnings"), [({}, 0), ({"weight": "rest"}, 1)])
def test_state_of_another_codec_is_lost_where_it_holds_something(means, caplog, held, warnings):
    means.load(OF_SIGNS | {"held": held})
    assert means.loaded == [_codec_states.nothing()]
    assert caplog.text.count("what LocalOptimizer's codec holds back begins at zero") == warnings


def test_own_state_is_gone_on_from(means, caplog):
    state = means.state()
    means.load(state)
    assert means.loaded == [state["held"]]
    assert not caplog.messages
