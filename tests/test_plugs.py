"""Where draftpair plugs in: commit hooks, the GitHub Action, `hf`, and pair facts for other tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftpair.families.rules import apply_rules
from draftpair.schemas import load_schema
from fixtures.folders import Folders

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
INDEX = "model.safetensors.index.json"

HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
SCRIPTS = {step["name"]: step["run"] for step in STEPS if "run" in step}


def environment(**extra: str) -> dict[str, str]:
    """This process's, with the console scripts of this environment first, and without a runner's own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GITHUB_")}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **extra}


def ran(command: list[str], folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(**extra), capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("hook", "good", "bad"),
    [
        ("draftpair-check-index", '{"weight_map": {"a": "b.safetensors"}}', '{"weight_map": {"a": "../b"}}'),
        ("draftpair-check-config", '{"hidden_size": 64}', '{"hidden_size": 64'),
    ],
)
def test_a_hook_passes_good_files_and_stops_bad_ones(tmp_path: Path, hook: str, good: str, bad: str) -> None:
    name = INDEX if hook.endswith("index") else "config.json"
    assert HOOKS[hook]["language"] == "python"
    for folder, text, code in (("good", good, 0), ("bad", bad, 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
        done = ran([*HOOKS[hook]["entry"].split(), f"{folder}/{name}"], tmp_path)
        assert done.returncode == code, done.stderr
        assert f"{folder}/{name}: " in done.stdout


def test_the_hooks_take_the_files_that_the_command_takes() -> None:
    assert set(HOOKS) == {"draftpair-check-index", "draftpair-check-config"}
    taken = {name: re.compile(hook["files"]) for name, hook in HOOKS.items()}
    index, config = taken["draftpair-check-index"], taken["draftpair-check-config"]
    assert index.search(INDEX)
    assert index.search(f"a/b/diffusion_pytorch_{INDEX}")
    assert not index.search("model.safetensors")
    assert config.search("config.json")
    assert config.search("a/config.json")
    for other in ("generation_config.json", "config.json.bak", "config.jsonl"):
        assert not config.search(other)


def expressions(value: Any) -> list[str]:
    """Everything that stands between the braces of the action."""
    return re.findall(r"\$\{\{(.*?)\}\}", json.dumps(value))


def test_the_action_refers_only_to_what_there_is() -> None:
    named = {name for text in expressions(ACTION) for name in re.findall(r"inputs\.([\w-]+)", text)}
    assert named == set(ACTION["inputs"])
    outputs = {step["id"]: set(re.findall(r'"([\w-]+)=\$', step["run"])) for step in STEPS if "id" in step}
    for text in expressions(ACTION):
        for step, output in re.findall(r"steps\.([\w-]+)\.outputs\.([\w-]+)", text):
            assert output in outputs[step]
    assert set(ACTION["outputs"]) == outputs["validate"]
    required = {name for name, spec in ACTION["inputs"].items() if spec["required"]}
    assert required == {"target"}
    assert all("default" in spec for name, spec in ACTION["inputs"].items() if name not in required)


def test_no_script_of_the_action_holds_an_input_itself() -> None:
    for name, script in SCRIPTS.items():
        assert "${{" not in script, f"{name}: an input would be run as a command"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_of_the_action_are_bash(name: str) -> None:
    step = next(step for step in STEPS if step["name"] == name)
    assert step["shell"] == "bash"
    subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, check=True)


def test_the_action_uploads_whatever_the_verdict() -> None:
    (upload,) = [step for step in STEPS if "upload-sarif" in step.get("uses", "")]
    assert "!cancelled()" in upload["if"]
    assert STEPS.index(upload) == len(STEPS) - 1


def acted(folder: Path, **inputs: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The action's validate step as a runner runs it, and the outputs that it gives."""
    (step,) = [step for step in STEPS if step.get("id") == "validate"]
    values = {name: spec.get("default", "") for name, spec in ACTION["inputs"].items()} | inputs
    env = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: str(values[found[1]]), text)
        for key, text in step["env"].items()
    }
    (folder / "step.sh").write_text(step["run"])
    outputs, summary = folder / "outputs", folder / "summary.md"
    outputs.write_text("")
    done = ran(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"],
        folder,
        GITHUB_OUTPUT=str(outputs),
        GITHUB_STEP_SUMMARY=str(summary),
        **env,
    )
    return done, dict(line.split("=", 1) for line in outputs.read_text().splitlines())


def sarif_of(folder: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((folder / "draftpair.sarif").read_text())["runs"][0]
    return run


def test_the_action_on_a_pair_that_fits(folders: Folders) -> None:
    folder = folders.raw.parent
    done, outputs = acted(folder, target="target", drafter="drafter")
    assert done.returncode == 0, done.stderr
    assert outputs == {"exit-code": "0", "sarif-file": "draftpair.sarif"}
    assert sarif_of(folder)["invocations"][0]["exitCode"] == 0
    assert (folder / "summary.md").read_text().count("### draftpair: ") == 1


def test_the_action_on_a_pair_that_does_not_fit(folders: Folders) -> None:
    folder = folders.raw.parent
    folders.edit(folders.drafter, "config.json", lambda config: config.update(block_size=1))
    done, outputs = acted(folder, target="target", drafter="drafter")
    assert done.returncode == 1, done.stderr
    assert outputs == {"exit-code": "1", "sarif-file": "draftpair.sarif"}
    assert sarif_of(folder)["invocations"][0]["exitCode"] == 1
    assert "CONFIG-BLOCK-SIZE" in done.stdout
    assert done.stdout.startswith("::error file=drafter/config.json,line=")


def test_the_action_on_one_checkpoint_without_sarif(folders: Folders) -> None:
    folder = folders.raw.parent
    done, outputs = acted(folder, target="target", format="text", **{"sarif-file": ""})
    assert (done.returncode, outputs) == (0, {"exit-code": "0"})
    assert done.stdout.startswith("sound")


def test_the_action_where_nothing_can_be_read(tmp_path: Path) -> None:
    done, outputs = acted(tmp_path, target="./absent dir; touch planted")
    assert (done.returncode, outputs) == (3, {"exit-code": "3"})
    assert "error: " in done.stderr
    assert not (tmp_path / "planted").exists()


def test_a_strict_action_fails_on_doubt(folders: Folders) -> None:
    folder = folders.raw.parent
    path = folders.target / "config.json"
    path.write_text(path.read_text().replace("{", '{"hidden_act": "silu", ', 1))  # a key twice is a warning
    doubtful = [
        acted(folder, target="target", drafter="drafter", strict=strict) for strict in ("false", "true")
    ]
    assert [done.returncode for done, _ in doubtful] == [0, 1]


@pytest.mark.parametrize("inputs", [{"strict": "yes"}, {"sarif-file": "file/draftpair.sarif"}])
def test_the_action_refuses_an_input_that_it_could_only_pass_over(
    folders: Folders, inputs: dict[str, str]
) -> None:
    folder = folders.raw.parent
    (folder / "file").write_text("")
    done, outputs = acted(folder, target="target", drafter="drafter", **inputs)
    assert (done.returncode, outputs) == (2, {"exit-code": "2"})
    ((name, value),) = inputs.items()
    assert f"::error::{name} is {value}" in done.stdout


def test_both_console_scripts_are_one_program_by_two_names() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"draftpair": "draftpair.cli:main", "hf-draftpair": "draftpair.cli:main"}
    for name in scripts:
        program = f"import sys; sys.argv[0] = '/bin/{name}'; from draftpair.cli import main; main()"
        usage = subprocess.run(
            [sys.executable, "-c", program, "check", "--help"], capture_output=True, text=True
        )
        assert usage.stdout.startswith(f"Usage: {name} check ")


README = (ROOT / "schemas" / "README.md").read_text(encoding="utf-8")


def test_the_readme_says_what_every_field_of_the_facts_is() -> None:
    rows = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    mentioned = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(load_schema("pair-facts")["properties"]) <= mentioned


def test_the_readme_explains_every_part_of_a_rule() -> None:
    rule = {key for shared in load_schema("pair-rules")["allOf"] for key in shared["rule"]}
    rows = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    assert rule <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_example_of_the_readme_finds_what_draftpair_finds(folders: Folders) -> None:
    (example,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", README, re.DOTALL)
    imported = set(re.findall(r"^(?:import|from) (\w+)", example, re.MULTILINE))
    assert imported == {"json", "re", "jsonschema"}
    folder = folders.raw.parent
    folders.edit(folders.target, "config.json", lambda config: config.update(rope_theta=12345.0))
    (folder / "example.py").write_text(example)
    for name, schema in (("pair-facts", "pair-facts"), ("family", "families/glm4_moe_lite_mtp")):
        (folder / f"{name}.json").write_text(ran(["draftpair", "schema", schema], folder).stdout)
    report = json.loads(ran(["draftpair", "validate", "target", "drafter", "--json"], folder).stdout)
    (folder / "facts.json").write_text(json.dumps(report["facts"]))
    done = ran([sys.executable, "example.py"], folder)
    assert done.returncode == 0, done.stderr
    printed = [line.partition(":")[0] for line in done.stdout.splitlines()]
    found = [f"{f.level} {f.rule}" for f in apply_rules(report["facts"], "glm4_moe_lite_mtp", "pair")]
    assert sorted(printed) == sorted(found)
    assert any(line.startswith("warning PAIR-ROPE: ") for line in done.stdout.splitlines())
