"""The rooms of the project and who may import whom, read off the syntax trees of the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Room -> rooms it may import. errors, findings and version belong to everybody.
MAY_IMPORT = {
    "checkpoint": set(),
    "schemas": set(),
    "families": {"checkpoint", "schemas"},
    "report": {"schemas"},
    "convert": {"checkpoint", "families", "schemas"},
    "validate": {"checkpoint", "families", "schemas"},
    "runtime": {"checkpoint", "families", "schemas", "validate"},
}
COMMON = {"errors", "findings", "version"}
HUB = "core/checkpoint/hub/"
FOLDERS = ("core", "convert", "validate", "runtime", "schemas")


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    """The room a source file belongs to; files directly in core/ form the room "core"."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "core" and len(parts) > 2 else parts[0]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Dotted names that a file imports, and whether at module level outside of `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = str(node.module)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "draftpair" else [module]
            yield from ((name, id(node) in at_top) for name in names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] == "draftpair" and len(parts) > 1 and room in MAY_IMPORT:
            allowed = MAY_IMPORT[room] | COMMON | {room}
            assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_special_libraries_stay_in_their_rooms(path: Path) -> None:
    room, relative = room_of(path), path.relative_to(ROOT).as_posix()
    for name, at_top in imports(path):
        library = name.split(".")[0]
        if library == "click":
            assert room == "cli", f"{relative} imports click"
        if library == "huggingface_hub":
            assert relative.startswith(HUB) or room == "cli", f"{relative} imports huggingface_hub"
        if library in ("mlx", "mlx_lm"):
            assert room == "runtime" or not at_top, f"{relative} imports {name} at module level"
            assert room in ("runtime", "convert", "cli"), f"{relative} imports {name}"


OUTERMOST = ("core/cli/__init__.py", "core/api.py")
"""Where any error may be caught: the whole command line, and a line of a list of pairs."""


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_code_has_no_assert_print_or_broad_except(path: Path) -> None:
    room, relative = room_of(path), path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{relative}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", where
        if isinstance(node, ast.ExceptHandler) and relative not in OUTERMOST:
            caught = getattr(node.type, "id", None) if node.type else "everything"
            assert caught not in ("everything", "Exception"), f"{where} in {room}"


def test_every_room_of_the_table_exists() -> None:
    assert MAY_IMPORT.keys() <= {room_of(path) for path in sources()}


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules after a statement, in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_help_loads_no_heavy_library() -> None:
    loaded = loaded_by("from draftpair.cli import run; run(['--help'])")
    assert not loaded & {"mlx", "mlx_lm", "numpy", "jsonschema", "huggingface_hub", "transformers"}


def test_inspect_and_validate_load_no_mlx(tmp_path: Path) -> None:
    from draftpair.toy import write_toy

    write_toy(tmp_path / "raw", with_head=True)
    write_toy(tmp_path / "target", with_head=False)
    folders = f"'{tmp_path}/raw', '{tmp_path}/target', '{tmp_path}/drafter'"
    loaded = loaded_by(
        f"from draftpair.cli import run; raw, target, drafter = {folders}\n"
        "codes = [run(['inspect', raw]), run(['split-mtp', '-m', raw, '-o', drafter]),"
        " run(['validate', target, drafter])]\n"
        "assert codes == [0, 0, 0], codes"
    )
    assert not loaded & {"mlx", "mlx_lm", "torch", "transformers", "ml_dtypes"}


def test_the_very_source_is_proven_without_numpy(tmp_path: Path) -> None:
    from draftpair import api
    from draftpair.toy import write_toy

    write_toy(tmp_path / "raw", with_head=True)
    api.split_mtp(tmp_path / "raw", tmp_path / "drafter")
    loaded = loaded_by(
        "from draftpair.cli import run\n"
        f"assert run(['validate', '{tmp_path}/raw', '{tmp_path}/drafter', '--no-values', '--strict']) == 0"
    )
    assert not loaded & {"mlx", "numpy", "yaml"}
