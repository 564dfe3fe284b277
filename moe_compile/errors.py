"""One class per kind of mistake, all derived from `MoeCompileError`.

Dynamo wraps whatever a backend raises in `BackendCompilerFailed` and whatever a function marked
`assume_constant_result` raises in `InternalTorchDynamoError`, so that a user cannot catch the original class. A
`ShortenTraceback` is let through unchanged in both places, with `fullgraph` on and off; hence the base class.

Every message has three parts: what was asked, what was found, what to do.
"""

from torch._dynamo.exc import ShortenTraceback


class MoeCompileError(ShortenTraceback):
    """Base class of everything that moe_compile raises on purpose.

    Args:
        asked: what the user requested.
        found: what stands against it.
        remedy: what to do instead.
    """

    def __init__(self, asked: str, found: str, remedy: str) -> None:
        stop = "" if found.endswith("?") else "."
        message = f"{asked}: {found}{stop} {remedy}."
        super().__init__(message, first_useful_frame=None)
        if isinstance(self, ImportError):
            ImportError.__init__(self, message)  # for `msg`, which Dynamo reads of every exception that has one
        self.asked = asked
        self.found = found
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.asked, self.found, self.remedy)


class UnknownBackendError(MoeCompileError, ValueError):
    """An experts backend's name that nothing is registered under."""


class SelectionError(MoeCompileError, ValueError):
    """A mapping of experts backends that is malformed or matches no experts block."""


class OptionError(MoeCompileError, ValueError):
    """A compile mode, an Inductor option or an argument of `backend()` that does not exist or does not fit."""


class RuleError(MoeCompileError):
    """The chosen experts backend is not legal here (compile mode, fullgraph, dtype, device, training)."""


class RequirementError(RuleError, ImportError):
    """Something that the chosen experts backend needs is missing: a device, a package, a compiler, a symbol."""


class ScaleFormatError(RuleError, ValueError):
    """Quantised weights whose scales are in a format that the chosen experts backend would misread."""


class KernelLoadError(MoeCompileError, ImportError):
    """A kernel of another project that is there, but cannot be imported or lacks what is called of it."""


class KernelResultError(MoeCompileError, ValueError):
    """A kernel that returned another shape or dtype than the experts block needs."""


class RegistrationError(MoeCompileError, ValueError):
    """An experts backend or a loader that cannot be registered, or does not keep its contract."""


class BlockInputError(MoeCompileError, ValueError):
    """Tensors of an experts block whose shapes, dtypes or devices do not fit together."""


class StackingError(MoeCompileError, ValueError):
    """Weights of experts that cannot be stacked, because they are not alike or are gone."""


class RewriteError(MoeCompileError, ValueError):
    """`rewrite()` was given something that it cannot rewrite."""


class ModelFunctionError(MoeCompileError, ValueError):
    """A `module:function` that gives no model, or a model that does not run uncompiled."""


class ReportError(MoeCompileError, ValueError):
    """A report that cannot be read, written or compared."""


class NoExpertsWarning(UserWarning):
    """The compiled model holds no experts block."""


class UnseenExpertsWarning(NoExpertsWarning):
    """An experts block never reaches the compiler: Dynamo left it to uncompiled Python, or split it."""


class FallbackWarning(UserWarning):
    """Another experts backend runs than the one that was asked for."""


class MemoryWarning(UserWarning):
    """An experts backend is about to copy many bytes per call."""


class TableWarning(UserWarning):
    """A file of measured times is not used, because it is damaged or belongs to another device or release."""
