"""Which sub-config of a composite model an experts block belongs to ("text_config", "vision_config", ...)."""

from typing import Any


def sub_configs(model: Any) -> dict[str, Any]:
    """Name -> config of the sub-configs that a model's config declares, empty without any."""
    config = getattr(model, "config", None)
    declared = getattr(config, "sub_configs", None) or {}
    return {name: getattr(config, name) for name in declared if getattr(config, name, None) is not None}


def sub_config_of(module: Any, model: Any) -> str:
    """Name of the sub-config whose config object a module holds, "" for the model's own config or none.

    A module that is compiled without the model around it is recognised by the name that its config's class declares
    for itself (`base_config_key`).
    """
    config = getattr(module, "config", None)
    if config is None or config is getattr(model, "config", None):
        return ""
    named = sub_configs(model)
    for name, candidate in named.items():
        if candidate is config:
            return name
    return getattr(config, "base_config_key", "") or ""
