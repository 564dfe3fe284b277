"""Measured tables: how long each experts backend takes for a block and token count on a device, as JSON files.

Two kinds are read: those shipped with the package (`measured/*.json`) and the one that `moe-compile tune` keeps in the
user's cache directory, which comes first. A file names its device, versions and date:

    {"format": 1, "device": "NVIDIA H200", "device_type": "cuda", "capability": [9, 0], "date": "2026-12-01",
     "versions": {"torch": "2.11.0+cu130", ...},
     "blocks": [{"E": 128, "K": 8, "D": 2048, "F": 768, "dtype": "bfloat16", "training": false, "cuda_graphs": false,
                 "microseconds": {"1": {"grouped_mm": 193.0, "triton": 142.0}, ...}}]}
"""

import contextlib
import functools
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_compile.errors import TableWarning
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec

FORMAT = 1
CACHE_VARIABLE = "MOE_COMPILE_CACHE_DIR"

# A block as near as this, in doublings of E, K, D and F together, stands for one that was not measured itself.
_NEAR = 3.0


@dataclass(frozen=True)
class BlockSize:
    """Sizes and dtype of a measured block: E experts, K of them per token, D features, F expert features."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str

    def distance(self, other: "BlockSize") -> float:
        """How many doublings of E, K, D and F lie between two blocks; infinite between dtypes."""
        if self.dtype != other.dtype:
            return math.inf
        pairs = zip(self._sizes(), other._sizes(), strict=True)
        return sum(abs(math.log2(mine / theirs)) for mine, theirs in pairs)

    def _sizes(self) -> tuple[int, int, int, int]:
        return self.num_experts, self.top_k, self.hidden_size, self.intermediate_size


@dataclass(frozen=True)
class Measurement:
    """What was measured for one block.

    Attributes:
        size: of the block.
        training: forward and backward, or forward alone.
        cuda_graphs: replayed as a CUDA graph, or called.
        microseconds: T -> experts backend -> median time of a call.
    """

    size: BlockSize
    training: bool
    cuda_graphs: bool
    microseconds: Mapping[int, Mapping[str, float]]

    def time(self, name: str, tokens: int) -> float | None:
        """Microseconds of a backend at a token count; None if it was not measured there.

        Between two measured counts time follows a power law; below the first, the first stands for it. Beyond the last
        one the time grows with the tokens. A backend that was given up at some count, because it had fallen behind, has
        no time beyond its last one.
        """
        points = sorted((count, times[name]) for count, times in self.microseconds.items() if name in times)
        if not points:
            return None
        last = max(self.microseconds)
        if tokens > points[-1][0]:
            return points[-1][1] * tokens / last if points[-1][0] == last else None
        below = max((point for point in points if point[0] <= tokens), default=points[0])
        above = min(point for point in points if point[0] >= min(tokens, points[-1][0]))
        if above[0] <= below[0]:
            return below[1]
        share = math.log(tokens / below[0]) / math.log(above[0] / below[0])
        return below[1] * (above[1] / below[1]) ** share


@dataclass(frozen=True)
class Table:
    """Everything measured on one device.

    Attributes:
        device: its name, as `device_name` gives it.
        device_type: "cuda" or "cpu".
        capability: CUDA compute capability, None elsewhere.
        date: ISO date.
        versions: of torch, triton and moe_compile.
        measurements: per block.
    """

    device: str
    device_type: str
    capability: tuple[int, int] | None
    date: str
    versions: Mapping[str, str]
    measurements: tuple[Measurement, ...]

    @property
    def origin(self) -> str:
        """Where and when it was measured, for people."""
        return f"measured on {self.device}, torch {self.versions.get('torch', '?')}, {self.date}"

    def nearest(self, size: BlockSize, *, training: bool, cuda_graphs: bool) -> Measurement | None:
        """What was measured for this block, or for one that is near enough to stand for it."""
        alike = [m for m in self.measurements if (m.training, m.cuda_graphs) == (training, cuda_graphs)]
        best = min(alike, key=lambda m: m.size.distance(size), default=None)
        return best if best is not None and best.size.distance(size) <= _NEAR else None

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON."""
        return {
            "format": FORMAT,
            "device": self.device,
            "device_type": self.device_type,
            "capability": self.capability,
            "date": self.date,
            "versions": dict(self.versions),
            "blocks": [_block_to_dict(m) for m in self.measurements],
        }


def size_of(spec: ExpertsSpec) -> BlockSize | None:
    """The size under which a block is looked up, None where a size or the dtype is not known.

    With dynamic shapes sizes may be symbolic, K first of all. What they were in the traced call stands for them: a
    guard on them would cost a compilation, and the choice changes no number.
    """
    sizes = [
        size.node.hint if isinstance(size, torch.SymInt) else size
        for size in (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size)
    ]
    if spec.weight_dtype is None or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    experts, top_k, hidden, inner = sizes
    return BlockSize(experts, top_k, hidden, inner, str(spec.weight_dtype).removeprefix("torch."))  # type: ignore[arg-type]


def device_name(device_type: str) -> str:
    """The name under which measurements of the current device are kept."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    if device_type == "cpu":
        return f"CPU {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return device_type


def tables_for(situation: Situation) -> list[Table]:
    """The tables that speak of a device, the user's own first, then shipped ones: its own, then of the same kind."""
    found = [] if situation.device_name is None else [read_table(cache_file(situation.device_name), situation)]
    shipped = [read_table(path) for path in shipped_files()]
    kind = [t for t in shipped if t and (t.device_type, t.capability) == (situation.device_type, situation.capability)]
    kind.sort(key=lambda table: table.device != situation.device_name)
    return [table for table in (*found, *kind) if table is not None]


def shipped_files() -> list[Path]:
    """The tables that are part of the package."""
    return sorted((Path(__file__).parent / "measured").glob("*.json"))


# Files ---------------------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Where the user's own tables lie: $MOE_COMPILE_CACHE_DIR, else moe_compile in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "moe_compile"


def cache_file(device: str) -> Path:
    """The user's own table of a device; another release of torch or of moe_compile has another one."""
    from moe_compile import __version__  # not complete yet while it imports this module

    torch_release = ".".join(torch.__version__.split(".")[:2])
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_directory() / f"{slug}-torch{torch_release}-moe_compile{__version__}.json"


def write_table(table: Table, path: Path) -> None:
    """Writes a table; a reader sees the old file or the new one, never half of it.

    Raises:
        OSError: if the directory cannot be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(table.to_dict(), file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_table(path: Path, situation: Situation | None = None) -> Table | None:
    """Reads a table; None if there is none.

    A file that is no table, or one of another device, is warned of with `TableWarning` and counts as none: the rule
    then decides.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return None
    table = _read(path, changed)
    expected = None if situation is None else situation.device_name
    if isinstance(table, str):
        problem = table
    elif expected is not None and table.device != expected:
        problem = f"it was measured on {table.device}, this is {expected}"
    else:
        return table
    warnings.warn(
        f"moe_compile does not use the measured table {path}: {problem}. Delete it, or measure again with "
        "`moe-compile tune`.",
        TableWarning,
        stacklevel=2,
    )
    return None


@functools.lru_cache(maxsize=32)
def _read(path: Path, changed: int) -> Table | str:
    """The table in a file, or what is wrong with it."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            return f"its format is {data['format']!r}, this release reads {FORMAT}"
        capability = data["capability"]
        return Table(
            device=_text(data["device"]),
            device_type=_text(data["device_type"]),
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
            date=_text(data["date"]),
            versions={_text(key): _text(value) for key, value in data["versions"].items()},
            measurements=tuple(map(_block_from_dict, data["blocks"])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"it is no table ({type(error).__name__}: {error})"


def _block_to_dict(measurement: Measurement) -> dict[str, Any]:
    size = measurement.size
    return {
        "E": size.num_experts,
        "K": size.top_k,
        "D": size.hidden_size,
        "F": size.intermediate_size,
        "dtype": size.dtype,
        "training": measurement.training,
        "cuda_graphs": measurement.cuda_graphs,
        "microseconds": {str(tokens): dict(times) for tokens, times in sorted(measurement.microseconds.items())},
    }


def _block_from_dict(data: Mapping[str, Any]) -> Measurement:
    times = {
        _positive(int(tokens)): {_text(name): _positive(float(time)) for name, time in row.items()}
        for tokens, row in data["microseconds"].items()
    }
    experts, top_k, hidden, inner = (_positive(int(data[key])) for key in ("E", "K", "D", "F"))
    size = BlockSize(experts, top_k, hidden, inner, _text(data["dtype"]))
    return Measurement(size, bool(data["training"]), bool(data["cuda_graphs"]), times)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {value!r}")
    return value


def _positive(value: Any) -> Any:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"expected a positive number, found {value!r}")
    return value
