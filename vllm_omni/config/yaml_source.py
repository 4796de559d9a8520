"""A deploy YAML as settings that know their line. Repeated keys are refused, not overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from vllm_omni.config.settings import Setting
from vllm_omni.errors import ConfigError

_DEPTH_OF_VALUES: Final = {"limits": 2, "stages": 3}
"""At which depth a key is a setting; what lies below is its value."""
_ENGINE_ARGS: Final = "engine_args"


def read_deploy(path: Path) -> list[Setting]:
    """Every setting of a deploy YAML, in the file's order.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigError(f"deploy config '{path}' cannot be read: {reason}") from exc
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        return [] if root is None else list(_Walk(path, loader).settings(root, ()))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {exc.problem or exc.context}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(exc).split())}") from exc
    finally:
        loader.dispose()


class _Walk:
    """Goes down the node tree; nodes carry their line, plain values do not."""

    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader

    def settings(self, node: yaml.Node, key: tuple[str, ...]) -> Iterator[Setting]:
        """Settings at and below `node`, which stands at `key`."""
        for name, name_node, value_node in self._items(node, key):
            here = (*key, name)
            if self._is_section(here):
                if not self._is_empty(value_node):
                    yield from self.settings(value_node, here)
            else:
                self._refuse_repeats(value_node, here)
                value = self._loader.construct_object(value_node, deep=True)
                yield Setting(here, value, self._where(name_node))

    def _items(
        self, node: yaml.Node, key: tuple[str, ...]
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            what = ".".join(key) or "the file"
            raise ConfigError(f"{self._where(node)}: {what} must be a mapping of names to values")
        seen: dict[str, int] = {}
        for name_node, value_node in node.value:
            name = str(self._loader.construct_object(name_node))
            if name in seen:
                raise ConfigError(
                    f"{self._where(name_node)}: {'.'.join((*key, name))} is already set "
                    f"in line {seen[name]}"
                )
            seen[name] = name_node.start_mark.line + 1
            yield name, name_node, value_node

    def _refuse_repeats(self, node: yaml.Node, key: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for name, _, value_node in self._items(node, key):
                self._refuse_repeats(value_node, (*key, name))
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._refuse_repeats(item, key)

    def _is_section(self, key: tuple[str, ...]) -> bool:
        if len(key) == _DEPTH_OF_VALUES["stages"] and key[-1] == _ENGINE_ARGS:
            return key[0] == "stages"
        return len(key) < _DEPTH_OF_VALUES.get(key[0], 1)

    def _is_empty(self, node: yaml.Node) -> bool:
        return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"

    def _where(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"
