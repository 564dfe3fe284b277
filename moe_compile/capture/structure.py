"""Which modules hold experts, told by their structure: nothing is run and nothing is proven."""

from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def holds_experts(module: nn.Module) -> bool:
    """Whether a module looks like an experts block, or like the part of one that holds the experts.

    It holds alike children in a container, or stacked parameters, in itself or in a child of its own; and a router with
    one output per expert, or a name, says that these are experts. A list of layers that hold experts is none.
    """
    for name, count in _groups(module):
        if "expert" in f"{type(module).__name__}.{name}".lower() or _has_router(module, count):
            return True
    return False


def _groups(module: nn.Module) -> Iterator[tuple[str, int]]:
    """What may be experts: a name and how many."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        members = list(module.children())
        if _alike(members):
            yield type(module).__name__, len(members)
    yield from _stacked(module)
    for name, child in module.named_children():
        members = list(child.children())
        if isinstance(child, _CONTAINERS) and _alike(members):
            yield name, len(members)
        yield from ((f"{name}.{inner}", count) for inner, count in _stacked(child))


def _alike(members: list[nn.Module]) -> bool:
    """At least two modules of one class with parameters, which hold no experts themselves."""
    return (
        len(members) > 1
        and len({type(member) for member in members}) == 1
        and all(next(member.parameters(), None) is not None for member in members)
        and not any(holds_experts(part) for part in members[0].modules())
    )


def _stacked(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Parameters with an axis of experts, or with that axis folded into the next; torch's own layers have none."""
    if type(module).__module__.startswith("torch.nn."):
        return
    own = list(module.named_parameters(recurse=False))
    for name, parameter in own:
        if parameter.dim() > 2 and parameter.shape[0] > 1:
            yield name, parameter.shape[0]
    counts = [value for name, value in vars(module).items() if "expert" in name and type(value) is int]
    counts += [child.out_features for child in module.children() if isinstance(child, nn.Linear)]
    folded = [name for name, parameter in own if parameter.dim() == 2]
    for count in counts:
        sizes = {dict(own)[name].shape[0] for name in folded}
        if len(folded) > 1 and count > 1 and all(size > count and size % count == 0 for size in sizes):
            yield folded[0], count


def _has_router(module: nn.Module, count: int) -> bool:
    """Whether a matrix of the module, or of a child outside the experts, has one row or column per expert."""
    own = list(module.named_parameters(recurse=False))
    for child in module.children():
        if not isinstance(child, _CONTAINERS):
            own += child.named_parameters(recurse=False)
    return any(parameter.dim() == 2 and list(parameter.shape).count(count) == 1 for _, parameter in own)


def has_line(cls: type[nn.Module], filename: str, line: int) -> bool:
    """Whether a line lies in a method of a module class."""
    classes = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]
    return any(
        filename == code.co_filename and code.co_firstlineno <= line <= _last_line(code)
        for base in classes
        for value in vars(base).values()
        for code in _codes(value)
    )


def _codes(value: object) -> Iterator[CodeType]:
    """Code of a method, and of what it wraps."""
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    while isinstance(function, FunctionType):
        yield function.__code__
        function = getattr(function, "__wrapped__", None)


def _last_line(code: CodeType) -> int:
    inner = [_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return max([code.co_firstlineno, *inner, *(line for _, _, line in code.co_lines() if line is not None)])
