"""Other spellings of the same ideas: recognised for any number of tokens, near misses refused with a reason."""

import pytest
import torch
from recognize_models import D
from spellings import REFUSED, REWRITTEN
from test_recognize import assert_equal, build, compiled, run


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str) -> None:
    model = build(REWRITTEN[name])
    x_TD = torch.randn(7, D)
    function, recorder = compiled(model, x_TD)
    # The second number of tokens makes Dynamo take any.
    for tokens in (7, 12):
        x_TD = torch.randn(tokens, D)
        assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert [(r.reason, r.node) for r in recorder.rejections] == []
    assert len(recorder.matches) == len(recorder.graphs) == 2


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, words = REFUSED[name]
    model = build(make)
    x_TD = torch.randn(9, D)
    function, recorder = compiled(model, x_TD)
    assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert recorder.matches == []
    (rejection,) = recorder.rejections
    assert words in rejection.reason
    assert rejection.node in [line[0] for line in recorder.before[0]]
    assert rejection.source is not None
