"""--config FILE: a run's config.json, or YAML by flag names. It is data, and runs no code."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from fastaug.config import TrainConfig, setting_owners
from fastaug.errors import ConfigError, first_line, suggest
from fastaug.settings import flag, switch

MAX_SIZE = 256 * 1024
"""Bytes of a config file; a run's config.json has about 2,000."""
MAX_TEXT = 4096
"""Characters of a value: those of a path on Linux."""
OF_ONE_RUN = ("out", "resume", "max_steps", "profile", "debug")
"""Settings that are not taken from another run's config.json."""


class ConfigFile:
    """The settings of a file, as the flags that they stand for."""

    def __init__(self, named: str) -> None:
        path = Path(named).expanduser()
        self.path = path / "config.json" if path.is_dir() else path
        self.has_all_settings = self.path.suffix == ".json"
        """True for a run's config.json, in which no setting is left to a recipe."""
        self.ignored: list[str] = []
        """Settings of a run's config.json that are not taken over."""
        self.settings = self._settings(self._content())

    def _content(self) -> Any:
        text = self._text()
        try:
            return json.loads(text) if self.has_all_settings else yaml.load(text, _Loader)
        except RecursionError as error:
            raise self.error("nested too deeply") from error
        except (ValueError, yaml.YAMLError) as error:
            kind = "JSON" if self.has_all_settings else "YAML"
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or first_line(error)
            raise self.error(f"not valid {kind} ({problem}{line})") from error

    def _text(self) -> str:
        if not self.path.is_file():  # reading a pipe may block, and a device may have no end
            raise self.error("no such file; give a run folder, its config.json, or a YAML file")
        try:
            with open(self.path, "rb") as file:
                content = file.read(MAX_SIZE + 1)
        except OSError as error:
            raise self.error(f"cannot be read ({error.strerror})") from error
        if content.startswith(b"PK\x03\x04"):  # a zip file, as torch.save writes it
            raise self.error(f"a checkpoint; give its run folder: --config {self.path.parent}")
        if len(content) > MAX_SIZE:
            raise self.error(f"larger than {MAX_SIZE // 1024} KB, the maximum of a config file")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self.error("not UTF-8 text") from error

    def _settings(self, content: Any) -> dict[str, Any]:
        if content is None:  # an empty YAML file
            return {}
        if not isinstance(content, dict):
            raise self.error(f"must have names and values, as 'views: 8', got {short(content)}")
        found: dict[str, Any] = {}
        for name, value in self._flat(content):
            if name in found:
                raise self.error(f"has {name} twice")
            found[name] = value
        if not self.has_all_settings:
            return found
        if 2 * len(found.keys() & setting_owners().keys()) < len(found):
            names = ", ".join(map(short, list(found)[:3]))
            raise self.error(f"not a config.json of a run, it has {names}; give a run folder")
        self.ignored = [name for name in OF_ONE_RUN if found.pop(name, None)]
        try:  # also of earlier versions
            return TrainConfig.from_saved(found).to_flat()
        except (ConfigError, TypeError, ValueError, AttributeError) as error:
            raise self.error(first_line(error)) from error

    def _flat(self, content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        """(name, value) of settings, which may be grouped by component."""
        components = {own.name for own in fields(TrainConfig)}
        for key, value in content.items():
            name = str(key).removeprefix("--").replace("-", "_")
            if name in components and isinstance(value, dict):
                yield from self._flat(value)
            elif name == "dali":
                if value is not True:
                    raise self.error(f"dali can only be true, got {short(value)}; or give loader")
                yield "loader", "dali"
            else:
                yield name, value

    def text(self, name: str) -> str:
        """The value of a setting that is text; "" if absent."""
        value = self.settings.get(name, "")
        if not isinstance(value, str):
            raise self.error(f"{name} cannot be {short(value)}")
        return value

    def flags(self) -> list[str]:
        """The settings as they are typed on the command line."""
        return [word for name, value in self.settings.items() for word in self._words(name, value)]

    def _words(self, name: str, value: Any) -> list[str]:
        if name not in setting_owners():
            near = suggest(name[:50], setting_owners())
            raise self.error(f"unknown setting {short(name)}: {near}")
        if isinstance(TrainConfig().get(name), bool):
            if not isinstance(value, bool):
                raise self.error(f"{name} must be true or false, got {short(value)}")
            return [switch(name, value)]
        if isinstance(value, bool):  # YAML reads off as false
            value = "off" if value is False else "true"
        items = value if isinstance(value, list) else [value]
        try:
            words = [_word(item) for item in items if _is_plain(item)]
        except ValueError as error:  # an integer of more than 4,300 digits
            raise self.error(f"{name}: {first_line(error)}") from error
        if len(words) < len(items) or any(w.startswith("--") or len(w) > MAX_TEXT for w in words):
            raise self.error(f"{name} cannot be {short(value)}")
        return [flag(name), *words] if isinstance(value, list) else [f"{flag(name)}={words[0]}"]

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"--config {self.path}: {message}")


def as_yaml(config: TrainConfig) -> str:
    """All settings, grouped by component, as --config reads them."""
    flat = config.to_flat()
    groups = {
        own.name: {n: flat[n] for n, owner in setting_owners().items() if owner == own.name}
        for own in fields(config)
    }
    return yaml.dump(groups, Dumper=_Dumper, sort_keys=False, width=100)


def short(value: Any) -> str:
    """A value for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _word(item: Any) -> str:
    """An item of a list as it is typed: [0.5, 0.4, 0.3] -> 0.5,0.4,0.3."""
    return ",".join(map(str, item)) if isinstance(item, list) else str(item)


def _is_plain(item: Any) -> bool:
    """True for text, a number, or a list of numbers as in --normalize."""
    if isinstance(item, list):
        return all(isinstance(own, (int, float)) for own in item)
    return isinstance(item, (str, int, float)) and not isinstance(item, bool)


class _Dumper(yaml.SafeDumper):
    """One setting per line."""

    def represent_list(self, data: Any) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_representer(list, _Dumper.represent_list)


class _Loader(yaml.SafeLoader):
    """YAML without aliases, which could make a small file huge, and without duplicate names."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    problem = f"{short(key.value)} occurs twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int | str:
        """16:32 is two sizes here; YAML 1.1 reads it as minutes and seconds."""
        return node.value if ":" in node.value else super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
