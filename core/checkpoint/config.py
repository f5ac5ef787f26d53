"""config.json as draftpair reads it: `text_config` before the root, null the same as absent.

Every value can say where it came from, so that a message can point at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from draftpair.checkpoint.rope import CONFIG_NAME, Rope, resolve_rope
from draftpair.checkpoint.strict_json import JSONProblem, parse_json
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused
from draftpair.findings import Finding

_TEXTS = ("text_config", "llm_config")
_HINT = f"Correct it, or take {CONFIG_NAME} from the original repository again."


class ConfigView:
    """A config over its root and its `text_config`, which some releases call `llm_config`.

    `raw` is the whole object, {} when there is none; `text` is `text_config` if that is an object, else
    the root; `text_key` is what it is called, None for the root.
    """

    def __init__(self, raw: dict[str, Any], places: Mapping[str, str] | None = None) -> None:
        self.raw = raw
        self._places = dict(places or {})
        self.text_key = next((key for key in _TEXTS if isinstance(raw.get(key), dict)), None)
        self.text: Mapping[str, Any] = raw[self.text_key] if self.text_key else raw

    def get(self, key: str, default: Any = None) -> Any:
        """The value in `text_config`, else at the root, else `default`; null counts as absent.

        A dot leads into an object: `mtp.num_hidden_layers`.
        """
        for level in (self.text, self.raw):
            value = _at(level, key)
            if value is not None:
                return value
        return default

    def having(self, values: Mapping[str, Any], where: Mapping[str, str] | None = None) -> ConfigView:
        """The same config with these values in its text model's part; `where` says from where in the file they are."""
        places = {**self._places, **(where or {})}
        if self.text_key is None:
            return ConfigView({**self.raw, **values}, places)
        return ConfigView({**self.raw, self.text_key: {**self.text, **values}}, places)

    def where(self, key: str) -> str | None:
        """The JSON pointer of the value that `get` returns, such as `/text_config/hidden_size`."""
        if key in self._places:
            return self._places[key]
        escaped = key.replace("~", "~0").replace("/", "~1").replace(".", "/")
        if self.text is not self.raw and _at(self.text, key) is not None:
            return f"/{self.text_key}/{escaped}"
        return f"/{escaped}" if _at(self.raw, key) is not None else None

    def place(self, key: str) -> str:
        """Where findings point: config.json and the JSON pointer of the value, or config.json alone without one."""
        pointer = self.where(key)
        return f"{CONFIG_NAME}#{pointer}" if pointer else CONFIG_NAME

    def require_int(self, key: str, minimum: int = 0) -> int:
        """The integer under `key`; Refused, naming key, file and value, if it is none or below `minimum`."""
        value = self.get(key)
        wanted = f"expected an integer of at least {minimum}"
        if value is None:
            raise Refused(f"{CONFIG_NAME} does not state {key}, {wanted}")
        if type(value) is not int or value < minimum:
            raise Refused(f"{CONFIG_NAME}: {self.where(key)} is {printable(repr(value), 60)}, {wanted}")
        return value

    @property
    def model_type(self) -> str | None:
        """The text model's type, else the root's; None when there is none or it is no string."""
        value = self.get("model_type")
        return value if isinstance(value, str) else None

    @property
    def root_model_type(self) -> str | None:
        """The type stated at the root, None when there is none or it is no string."""
        value = self.raw.get("model_type")
        return value if isinstance(value, str) else None

    @property
    def quantization(self) -> dict[str, Any] | None:
        """How MLX's packed weights are read: ``quantization`` at the root, else its twin; None without one."""
        for key in ("quantization", "quantization_config"):
            value = self.raw.get(key)
            if isinstance(value, dict):
                return value
        return None

    @cached_property
    def rope(self) -> Rope:
        """The rotary position settings, resolved once."""
        return resolve_rope(self.get, self.where)


def _at(level: Any, key: str) -> Any:
    """The value that a key, or a path of keys joined by dots, leads to; None where it leads nowhere."""
    for part in key.split("."):
        if not isinstance(level, Mapping):
            return None
        level = level.get(part)
    return level


def parse_config(data: bytes) -> tuple[ConfigView, list[Finding]]:
    """The view of a config.json and what is wrong with it; an unusable file gives an empty view.

    A repeated key is a warning, and NaN or infinity a note: Python's reader takes both, and real configs have them.
    """
    try:
        parsed = parse_json(data)
    except JSONProblem as problem:
        return ConfigView({}), [_finding(f"is not JSON: {problem}")]
    if not isinstance(parsed.value, dict):
        return ConfigView({}), [_finding("is not a JSON object")]
    view = ConfigView(parsed.value)
    level = "warning" if parsed.repeated else "note"
    oddities = parsed.repeated or parsed.oddities
    findings = [_finding(f"is not strict JSON: {oddity}", level) for oddity in oddities[:1]]
    if parsed.value.get(_TEXTS[0]) is not None and view.text is view.raw:
        findings.append(
            _finding(f"has a {_TEXTS[0]} that is not an object; the root is used", pointer=f"/{_TEXTS[0]}")
        )
    return view, [*findings, *view.rope.conflicts]


def _finding(problem: str, level: Any = "error", pointer: str = "") -> Finding:
    where = f"{CONFIG_NAME}#{pointer}" if pointer else CONFIG_NAME
    return Finding("CONFIG-PARSE", level, f"{CONFIG_NAME} {problem}", where, hint=_HINT)
