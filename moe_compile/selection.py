"""Which experts backend was asked for: a name, or a mapping of sub-configs and module paths to names."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moe_compile.decoding import SWITCHED_FROM
from moe_compile.errors import SelectionError
from moe_compile.experts_backends import AUTO, check_name

Experts = str | Mapping[str, str]


@dataclass(frozen=True)
class Selection:
    """A checked choice; immutable, so that its `signature` identifies compiled code.

    Attributes:
        entries: (key, name) pairs; the key "" is the default, any other one a sub-config ("text_config") or a glob
            over module paths ("model.layers.0.*").
        decode: what takes the place of grouped_mm while decoding, None for grouped_mm itself.
    """

    entries: tuple[tuple[str, str], ...]
    decode: str | None = None

    @classmethod
    def of(cls, experts: Experts, decode: str | None = None) -> "Selection":
        """Checks what a user passed as `experts` and `decode`.

        Raises:
            UnknownBackendError: for a name that is not registered.
            SelectionError: for a mapping with keys that are not strings, or an empty one.
        """
        decode = None if decode is None else check_name(decode, "decode")
        if not isinstance(experts, Mapping):
            return cls((("", check_name(experts)),), decode)
        if not experts or not all(isinstance(key, str) for key in experts):
            raise SelectionError(
                f"experts={dict(experts)!r}",
                "a mapping needs at least one entry, and strings as keys",
                'Map sub-configs or module paths to names, such as {"": "grouped_mm", "vision_config": "eager"}',
            )
        entries = {"": AUTO, **{key: check_name(name) for key, name in experts.items()}}
        return cls(tuple(entries.items()), decode)

    @property
    def signature(self) -> str:
        """A string that differs whenever the choice does; compiled code is guarded by it."""
        return repr((sorted(self.entries), self.decode))

    def while_decoding(self) -> "Selection":
        """The choice in the decode stage: grouped_mm entries are replaced, all others stay."""
        if self.decode is None:
            return self
        switched = tuple((key, self.decode if name == SWITCHED_FROM else name) for key, name in self.entries)
        return Selection(switched, self.decode)

    @property
    def varies(self) -> bool:
        """Whether different blocks may get different backends."""
        return len({name for _, name in self.entries}) > 1

    def name_for(self, path: str, sub_config: str) -> str:
        """The name chosen for the block at a module path: the longest matching glob, else its sub-config's, else ""."""
        choices = dict(self.entries)
        globs = [key for key in choices if key and fnmatchcase(path, key)]
        if globs:
            return choices[max(globs, key=len)]
        return self.name_for_sub_config(sub_config)

    def name_for_sub_config(self, sub_config: str) -> str:
        """The name chosen for the blocks of a sub-config that no glob matches."""
        choices = dict(self.entries)
        return choices.get(sub_config, choices[""])

    def check_keys(self, paths: Iterable[str], sub_configs: Iterable[str]) -> None:
        """Refuses keys that can never match.

        Args:
            paths: paths of every module of the compiled model.
            sub_configs: names of the sub-configs that the model has.

        Raises:
            SelectionError: for a key that is neither a sub-config nor a glob that matches a module.
        """
        paths, sub_configs = list(paths), list(sub_configs)
        for key, name in self.entries:
            if not key or key in sub_configs or any(fnmatchcase(path, key) for path in paths):
                continue
            raise SelectionError(
                f"experts={{{key!r}: {name!r}}}",
                f"{key!r} is no sub-config and matches none of the {len(paths)} module paths of the compiled model",
                f"Its sub-configs are {', '.join(sub_configs) or 'none'}; paths look like {_example(paths)!r}",
            )


def _example(paths: list[str]) -> str:
    experts = [path for path in paths if "experts" in path]
    return (experts or paths or [""])[0]
