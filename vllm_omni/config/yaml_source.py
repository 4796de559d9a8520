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
_DEPTH_OF_STAGE: Final = 2
_MAX_BYTES: Final = 1 << 20
_MAX_NODES: Final = 50_000
"""Values in a file. An alias counts as often as it is used: ten lines can mean billions."""


def read_deploy(path: Path) -> list[Setting]:
    """Every setting of a deploy YAML, in the file's order.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or repeats a key.
    """
    text = _read(path)
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        return [] if root is None else list(_Walk(path, loader).settings(root, ()))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {exc.problem or exc.context}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(exc).split())}") from exc
    except RecursionError:
        raise ConfigError(f"{path}: not a deploy YAML: it is nested too deep") from None
    finally:
        if loader is not None:
            loader.dispose()


def _read(path: Path) -> str:
    try:
        if not path.is_file():
            reason = "it is no file" if path.exists() else "No such file or directory"
            raise ConfigError(f"deploy config '{path}' cannot be read: {reason}")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ConfigError(
                f"deploy config '{path}' cannot be read: {size} bytes are more than a deploy "
                f"YAML may have, {_MAX_BYTES}"
            )
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as exc:
        reason = exc.strerror or "not readable" if isinstance(exc, OSError) else "not UTF-8"
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(f"deploy config '{path}' cannot be read: {reason}") from exc


class _Walk:
    """Goes down the node tree; nodes carry their line, plain values do not."""

    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader
        self._num_nodes = 0

    def settings(self, node: yaml.Node, key: tuple[str, ...]) -> Iterator[Setting]:
        """Settings at and below `node`, which stands at `key`."""
        for name, name_node, value_node in self._items(node, key):
            here = (*key, name)
            where = self._where(name_node)
            if not self._is_section(here):
                self._refuse_repeats(value_node, here)
                yield Setting(here, self._constructed(value_node, deep=True), where)
            elif not self._is_empty(value_node):
                yield from self.settings(value_node, here)
            elif len(here) == _DEPTH_OF_STAGE and here[0] == "stages":
                yield Setting(here, None, where)  # the name must be a stage's all the same

    def _items(
        self, node: yaml.Node, key: tuple[str, ...]
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            what = ".".join(key) or "the file"
            raise ConfigError(f"{self._where(node)}: {what} must be a mapping of names to values")
        seen: dict[str, int] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                raise ConfigError(f"{self._where(name_node)}: a name must be a word")
            name = str(self._constructed(name_node))
            if name in seen:
                raise ConfigError(
                    f"{self._where(name_node)}: {'.'.join((*key, name))} is already set "
                    f"in line {seen[name]}"
                )
            seen[name] = name_node.start_mark.line + 1
            yield name, name_node, value_node

    def _constructed(self, node: yaml.Node, *, deep: bool = False) -> object:
        try:
            return self._loader.construct_object(node, deep=deep)
        except (ValueError, OverflowError) as exc:  # a date of the 99th, and the like
            raise ConfigError(f"{self._where(node)}: not YAML: {exc}") from exc

    def _refuse_repeats(self, node: yaml.Node, key: tuple[str, ...]) -> None:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise ConfigError(
                f"{self._where(node)}: {'.'.join(key)} has more than {_MAX_NODES} values, aliases "
                "included"
            )
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
        if isinstance(node, yaml.MappingNode):
            return not node.value
        return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"

    def _where(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"
