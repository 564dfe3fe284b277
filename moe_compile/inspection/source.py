"""A graph as a Python file that runs by itself: its code, the imports that it needs, and inputs of the right shapes."""

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import _get_qualified_name

MARK = "  # experts block "

_HEADER = '''\
"""{title}

Runs by itself: python {file}
Inputs are random numbers of the traced shapes; integers are zeros, which are valid positions and ids.
"""

import moe_compile.backend  # registers the ops of moe_compile
import torch
'''

# Stands among a node's paths where the node was traced in place of a class's own code.
CAPTURED = "captured"
_CAPTURED = os.path.join("capture", "experts_block.py")

# Constants up to this many elements are written out.
_SMALL = 64


def to_source(gm: GraphModule, title: str, file: str) -> str:
    """A graph module, and the graph modules in it, as a Python program.

    Args:
        gm: with fake tensors in its metadata, as Dynamo hands it over.
        title: first line of the program's docstring.
        file: the name that the file will have.
    """
    modules = {name: module for name, module in gm.named_modules() if isinstance(module, GraphModule)}
    imports: dict[str, None] = {}
    classes = []
    for name, module in sorted(modules.items(), key=lambda item: -item[0].count(".") - bool(item[0])):
        code = module.graph.python_code("self", verbose=True)
        imports.update(dict.fromkeys(_imports(code.globals)))
        classes.append(_class(_class_name(name), _members(module, name, modules), code.src))
    arguments = [f"{_example(node)},  # {node.name}" for node in gm.graph.nodes if node.op == "placeholder"]
    lines = ["def inputs():", "    torch.manual_seed(0)", "    return ["]
    lines += [f"        {argument}" for argument in arguments]
    lines += ["    ]", "", "", 'if __name__ == "__main__":', f"    print({_class_name('')}()(*inputs()))"]
    head = _HEADER.format(title=title, file=file) + "".join(f"{line}\n" for line in imports)
    return "\n\n\n".join([head.rstrip(), *classes, "\n".join(lines)]) + "\n"


def marked(source: str, blocks: dict[str, str]) -> str:
    """The source with the lines of experts blocks marked.

    Args:
        source: a program that `to_source` wrote.
        blocks: name of a node -> path of the block that it belongs to.
    """
    lines = []
    for line in source.splitlines():
        words = line.strip().replace(":", " ").split(" ", 1)
        path = blocks.get(words[0]) if line.startswith("        ") else None
        lines.append(f"{line}{MARK}{path}" if path is not None else line)
    return "\n".join(lines) + "\n"


def module_paths(gm: GraphModule) -> dict[str, list[str]]:
    """Name of each node -> the paths of the modules whose code it stems from, outermost first, and `CAPTURED`."""
    found: dict[str, list[str]] = {}
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                stack = node.meta.get("nn_module_stack") or {}
                found[node.name] = [str(entry[0]) for entry in stack.values()]
                if _CAPTURED in (node.meta.get("stack_trace") or ""):
                    found[node.name].append(CAPTURED)
    return found


def count_targets(gm: GraphModule) -> dict[str, int]:
    """How often each operation is called in a graph and its subgraphs."""
    counts: dict[str, int] = {}
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if node.op.startswith("call_"):
                    name = _target_name(node)
                    counts[name] = counts.get(name, 0) + 1
    return counts


def _target_name(node: Node) -> str:
    if isinstance(node.target, str):
        return f".{node.target}"
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(node.target)
    return _get_qualified_name(node.target)


def _class(name: str, members: list[str], code: str) -> str:
    lines = [f"class {name}(torch.nn.Module):"]
    if members:
        lines += ["    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in members), ""]
    body = [line.replace("def <lambda>", "def forward") for line in code.strip().splitlines()]
    return "\n".join(lines + [f"    {line}" if line.strip() else "" for line in body])


def _class_name(path: str) -> str:
    return "GraphModule" + "".join(f"_{letter}" if not letter.isalnum() else letter for letter in f".{path}" if path)


def _members(module: GraphModule, path: str, modules: dict[str, GraphModule]) -> list[str]:
    """Statements that make what a graph reads off its module."""
    lines = []
    for target in dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr"):
        inner = f"{path}.{target}" if path else target
        if inner in modules:
            lines.append(f"self.{target} = {_class_name(inner)}()")
            continue
        value: Any = module
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            lines.append(f"self.{target} = {_constant(value)}")
    lines += [
        f"self.{node.target} = {_class_name(f'{path}.{node.target}' if path else str(node.target))}()"
        for node in module.graph.nodes
        if node.op == "call_module"
    ]
    return lines


def _constant(value: torch.Tensor) -> str:
    fake = isinstance(value, torch._subclasses.FakeTensor)
    if not fake and value.numel() <= _SMALL and value.dtype in (torch.float32, torch.int64, torch.int32, torch.bool):
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={str(value.device)!r})"
    return _random(value)


def _example(node: Node) -> str:
    value = node.meta.get("example_value", node.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return _random(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return repr(_number(value))
    return repr(value)


def _random(value: torch.Tensor) -> str:
    size = [_number(length) for length in value.shape]
    stride = [_number(length) for length in value.stride()]
    made = f"torch.empty_strided({size}, {stride}, dtype={value.dtype}, device={str(value.device)!r})"
    if value.is_floating_point():
        made += ".normal_()" if value.dtype.itemsize > 1 else ".zero_()"
    else:
        made += ".fill_(True)" if value.dtype is torch.bool else ".zero_()"
    return made + (".requires_grad_()" if value.requires_grad else "")


def _number(value: Any) -> Any:
    """The number that stood for a symbol when it was traced."""
    return value if isinstance(value, int | float) else value.node.hint


def _imports(names: dict[str, Any]) -> Iterator[str]:
    """Import statements for the global names of generated code."""
    for name, value in sorted(names.items()):
        if name == "torch":
            continue
        if isinstance(value, ModuleType):
            yield f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
        elif value is type(None):
            yield f"{name} = type(None)"
        elif isinstance(value, float):
            yield f"{name} = float({str(value)!r})"
        elif getattr(torch, name, None) is value:
            yield f"from torch import {name}"
        elif getattr(value, "__module__", None) and getattr(value, "__qualname__", "").isidentifier():
            yield f"from {value.__module__} import {value.__qualname__} as {name}"
