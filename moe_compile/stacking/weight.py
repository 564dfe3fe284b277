"""What is said of a stacked weight in reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StackedWeight:
    """One stacked weight of a module.

    Attributes:
        name: of the group of parameters.
        num_experts: E.
        nbytes: size of the buffer in bytes.
        copied_because: why the weights are copied at every call, None if the parameters are windows of the buffer.
    """

    name: str
    num_experts: int
    nbytes: int
    copied_because: str | None

    def __str__(self) -> str:
        where = "one buffer" if self.copied_because is None else f"copied at every call: {self.copied_because}"
        return f"{self.name}: {self.num_experts} experts, {self.nbytes} bytes, {where}"
