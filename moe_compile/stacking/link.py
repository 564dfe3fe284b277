"""The way of gradients from a stacked weight to the parameters that lie in it.

Compiled code takes the stacked weight as one input. Where gradients are recorded, that input is replaced, at each call,
by the output of an autograd function over the E parameters. To autograd the parameters are then ordinary leaves: hooks,
`torch.autograd.grad`, accumulation, DDP and gradient scalers see what they would see without a stack. All gradients of
a stack are windows of one tensor.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor

_version = attrgetter("_version")


class _Linked(torch.autograd.Function):
    """A stacked weight (E, ...) as a function of its E parameters (...)."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.parameters, ctx.versions = parameters, list(map(_version, parameters))
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # The buffer does not see in-place changes of the parameters, so what autograd says of them is said here.
        if list(map(_version, ctx.parameters)) != ctx.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "a weight that is stacked with others was changed between forward and backward"
            )
        return None, *gradient.contiguous().unbind(0)


# id of a stacked weight -> itself, and what gives its parameters; the weight's end removes the entry.
_linkable: dict[int, tuple["ref[Tensor]", "WeakMethod[Callable[[Tensor], Sequence[Tensor]]]"]] = {}


def make_linkable(buffer: Tensor, parameters_of: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """Tells which parameters a stacked weight stands for, by a method that is not kept alive."""
    number = id(buffer)
    _linkable[number] = ref(buffer, lambda _: _linkable.pop(number, None)), WeakMethod(parameters_of)


def link(value: Any) -> Any:
    """A stacked weight through which gradients reach its parameters; anything else as it is."""
    if id(value) not in _linkable or not torch.is_grad_enabled():
        return value
    parameters_of = _linkable[id(value)][1]()
    assert parameters_of is not None
    return _Linked.apply(value.detach(), *parameters_of(value))


def linking(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """A compiled graph whose inputs at some places are stacked weights, with gradients for their parameters.

    Args:
        compiled: the compiled graph.
        places: numbers of the inputs that are stacked weights.
    """
    if not places:
        return compiled

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        inputs = list(args)
        for place in places:
            inputs[place] = link(inputs[place])
        return compiled(*inputs)

    return run
