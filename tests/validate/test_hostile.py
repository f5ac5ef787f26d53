"""What a new user or an enemy gives: input that ends badly, false alarms, false peace, misleading words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from draftpair import api
from draftpair.cli import cli, run
from draftpair.errors import ToolError, Usage
from fixtures import gemma4_assistant, tapped
from fixtures.split_heads import altered, edit_tensors
from fixtures.weights import write_json

PASSING = ("proven", "compatible")


def pair(
    folder: Path, family: str = "dflash", variant: str = "old_shape", **target: Any
) -> tuple[Path, Path]:
    """A target and a drafter that pass together."""
    made = tapped.write_target(folder / "target", **target)
    return made, tapped.write_drafter(folder / "drafter", family, variant)


def gemma(folder: Path) -> tuple[Path, Path]:
    return gemma4_assistant.write_target(folder / "target"), gemma4_assistant.write_drafter(
        folder / "drafter"
    )


def found(report: dict[str, Any], *levels: str) -> dict[str, dict[str, Any]]:
    """The findings of some levels by rule, of all levels when none is named."""
    return {f["rule"]: f for f in report["findings"] if not levels or f["level"] in levels}


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    write_json(folder / "config.json", config)


def without_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


# What must not end in a traceback, nor take long.


@pytest.mark.parametrize(
    "line",
    [
        "date: 2024-13-01",
        "date: 2001-12-14 25:61:61",
        "date: 2001-12-14t21:59:43.10-99:99",
        "x: " + "9" * 5000,
        "x: 0x_",
        'x: !!int ""',
        "x: !!bool maybe",
        "x: !!timestamp soon",
        'x: "\\UFFFFFFFF"',
        "x: " + "[" * 500 + "]" * 500,
    ],
    ids=["month", "hour", "zone", "digits", "hex", "int", "bool", "timestamp", "escape", "depth"],
)
def test_a_card_that_no_yaml_reader_takes_is_passed_over(tmp_path: Path, line: str) -> None:
    target, drafter = pair(tmp_path)
    (drafter / "README.md").write_text(f"---\nbase_model: owner/name\n{line}\n---\n")
    assert api.validate(target, drafter)["verdict"] in PASSING


def test_of_a_huge_card_only_the_front_matter_of_a_real_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair(tmp_path)
    (drafter / "README.md").write_text("---\nx: " + "a" * 1_500_000 + "\n---\n")
    read: list[int] = []
    monkeypatch.setattr(yaml, "safe_load", lambda text: read.append(len(text)))
    api.validate(target, drafter)
    assert max(read, default=0) < 1_000_000


def test_a_list_of_pairs_in_another_encoding_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_bytes('{"target": "modèle"}\n'.encode("latin-1"))
    code = run(["validate", "--pairs", str(tmp_path / "pairs.jsonl")])
    assert "bug in draftpair" not in capsys.readouterr().err
    assert code == 2


def test_half_of_a_surrogate_pair_in_a_line_stops_no_other_line(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    good = json.dumps({"target": str(target), "drafter": str(drafter)})
    results = list(api.validate_pairs(['{"target": "\\ud800"}', good], jobs=1))
    assert [result["line"] for result in results] == [1, 2]
    assert results[0]["error"]
    assert results[1]["exit_code"] == 0


def test_a_width_of_thousands_of_digits_in_the_environment_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair(tmp_path)
    monkeypatch.setenv("LLAMA_ARG_DRAFT_BLOCK_SIZE", "9" * 5000)
    with pytest.raises(Usage, match="LLAMA_ARG_DRAFT_BLOCK_SIZE"):
        api.validate(target, drafter)


@pytest.mark.parametrize("value", [list(range(2000)), "x" * 10_000])
def test_a_message_does_not_repeat_a_huge_value(tmp_path: Path, value: Any) -> None:
    target, _ = pair(tmp_path)
    drafter = tapped.write_drafter(tmp_path / "huge", "dflash", "old_shape", tapped.top(hidden_act=value))
    finding = found(api.validate(target, drafter), "error")["CONFIG-ACTIVATION"]
    assert len(finding["message"]) < 1000


@pytest.mark.parametrize(
    ("family", "variant", "rule", "change"),
    [
        pytest.param(
            "eagle3",
            "speculators_qwen3",
            "CONFIG-PROPOSAL-METHOD",
            lambda c: c["speculators_config"].update(proposal_methods=[{"proposal_type": "x"}] * 2000),
            id="proposal methods",
        ),
        pytest.param(
            "dflash",
            "speculators",
            "CONFIG-CONFLICT",
            tapped.top(target_layer_ids=list(range(2000))),
            id="taps in two spellings",
        ),
    ],
)
def test_a_message_does_not_repeat_a_long_list(
    tmp_path: Path, family: str, variant: str, rule: str, change: tapped.ConfigChange
) -> None:
    drafter = tapped.write_drafter(tmp_path / "drafter", family, variant, change)
    assert len(found(api.validate(drafter), "error")[rule]["message"]) < 1000


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        pytest.param("new_shape", tapped.top(layer_types=["full_attention"] * 200_000), id="list"),
        pytest.param("old_shape", tapped.nested(**{f"k{n}": n for n in range(400_000)}), id="object"),
    ],
)
def test_a_config_of_absurd_length_is_judged_in_little_time(
    tmp_path: Path, variant: str, change: tapped.ConfigChange
) -> None:
    drafter = tapped.write_drafter(tmp_path / "drafter", "dflash", variant, change)
    begun = time.process_time()
    api.validate(drafter)
    assert time.process_time() - begun < 1


# False peace: nothing here may pass.


@pytest.mark.parametrize("family", ["dflash", "gemma4_assistant"])
def test_a_target_without_any_weights_is_not_compatible(tmp_path: Path, family: str) -> None:
    target, drafter = gemma(tmp_path) if family == "gemma4_assistant" else pair(tmp_path)
    assert api.validate(target, drafter)["verdict"] == "compatible"
    without_weights(target)
    assert api.validate(target, drafter)["verdict"] not in PASSING


def test_a_target_whose_weights_are_in_another_format_is_not_compatible(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    without_weights(target)
    (target / "model-Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(100))
    assert api.validate(target, drafter)["verdict"] not in PASSING


def full_rope(config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = config["text_config"]["rope_parameters"]["full_attention"]
    return rope


@pytest.mark.parametrize(
    ("side", "change"),
    [
        pytest.param(
            "drafter", lambda c: full_rope(c).pop("partial_rotary_factor"), id="drafter turns whole heads"
        ),
        pytest.param(
            "target", lambda c: full_rope(c).pop("partial_rotary_factor"), id="target turns whole heads"
        ),
        pytest.param("target", lambda c: full_rope(c).pop("rope_theta"), id="target states no base"),
        pytest.param("target", lambda c: c["text_config"].pop("rope_parameters"), id="target states nothing"),
        pytest.param(
            "drafter", lambda c: c["text_config"].update(sliding_window=16), id="drafter has another window"
        ),
        pytest.param(
            "target", lambda c: c["text_config"].update(sliding_window=16), id="target has another window"
        ),
    ],
)
def test_what_a_gemma_assistant_shares_has_to_be_stated_and_equal(
    tmp_path: Path, side: str, change: Callable[[dict[str, Any]], object]
) -> None:
    target, drafter = gemma(tmp_path)
    assert api.validate(target, drafter)["verdict"] == "compatible"
    edit_config({"target": target, "drafter": drafter}[side], change)
    assert api.validate(target, drafter)["verdict"] not in PASSING


@pytest.mark.parametrize("key", ["head_dim", "global_head_dim", "num_key_value_heads"])
def test_shared_keys_of_unknown_width_are_not_called_equal(tmp_path: Path, key: str) -> None:
    target, drafter = gemma(tmp_path)
    edit_config(target, lambda config: config["text_config"].pop(key))
    shared = api.validate(target, drafter)["facts"]["shared_kv"]
    known = all(None not in layer["target"].values() for layer in shared["layers"])
    assert known or shared["relation"] != "equal"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            tapped.layer(rope_parameters={"rope_type": "default", "rope_theta": 1e6}), id="rope base"
        ),
        pytest.param(tapped.layer(rms_norm_eps=1e-3), id="epsilon"),
    ],
)
def test_a_head_in_speculators_format_computes_as_its_target_does(
    tmp_path: Path, change: tapped.ConfigChange
) -> None:
    layers = tapped.variants("speculators_mtp")["qwen3"]["config"]["transformer_layer_config"][
        "num_hidden_layers"
    ]
    target = tapped.write_target(tmp_path / "target", layers=layers)
    whole = tapped.write_drafter(tmp_path / "whole", "speculators_mtp", "qwen3")
    assert api.validate(target, whole)["verdict"] == "compatible"
    drafter = tapped.write_drafter(tmp_path / "drafter", "speculators_mtp", "qwen3", change)
    assert api.validate(target, drafter)["verdict"] not in PASSING


@pytest.mark.parametrize(
    ("family", "variant", "change"),
    [
        pytest.param("dflash", "old_shape", tapped.top(rms_norm_eps=float("nan")), id="NaN for an epsilon"),
        pytest.param(
            "dflash", "z_lab", tapped.top(rope_parameters={"rope_type": "default"}), id="no rope base"
        ),
        pytest.param(
            "dflash", "speculators", tapped.layer(rope_parameters={"rope_theta": -1}), id="negative rope base"
        ),
        pytest.param(
            "eagle3", "speculators_qwen3", tapped.layer(rope_parameters={"rope_theta": "x"}), id="rope base x"
        ),
        pytest.param(
            "deepspec_dspark", "qwen3", tapped.top(hidden_act="relu"), id="activation of Qwen3 layers"
        ),
        pytest.param("dflash2", "speculators", tapped.top(draft_vocab_size=1), id="draft vocabulary of one"),
        pytest.param(
            "dflash",
            "speculators",
            lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=-1),
            id="-1 proposals",
        ),
    ],
)
def test_a_number_that_no_drafter_can_have_is_refused(
    tmp_path: Path, family: str, variant: str, change: tapped.ConfigChange
) -> None:
    target = tapped.write_target(tmp_path / "target")
    drafter = tapped.write_drafter(tmp_path / "drafter", family, variant, change)
    assert api.validate(target, drafter)["verdict"] not in PASSING


def turned(name: str) -> tapped.TensorChange:
    """The values of a table in the opposite order."""
    return lambda tensors: tensors.update({name: (tensors[name][0][::-1], tensors[name][1])})


def no_tokens(tensors: tapped.Tensors) -> None:
    values, dtype = tensors["t2d"]
    tensors["t2d"] = (values & False, dtype)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(no_tokens, id="no token is in the draft vocabulary"),
        pytest.param(turned("t2d"), id="other tokens are"),
        pytest.param(tapped.zeroed("d2t"), id="draft ids stand for other tokens"),
    ],
)
def test_both_tables_of_a_draft_vocabulary_name_the_same_tokens(
    tmp_path: Path, change: tapped.TensorChange
) -> None:
    target = tapped.write_target(tmp_path / "target")
    family, variant = "dflash", "speculators_reduced"
    whole = tapped.write_drafter(tmp_path / "whole", family, variant)
    assert api.validate(target, whole)["verdict"] == "compatible"
    drafter = tapped.write_drafter(tmp_path / "drafter", family, variant, tensors=change)
    assert api.validate(target, drafter)["verdict"] not in PASSING


def test_gains_that_overflow_at_the_first_product_are_refused(tmp_path: Path) -> None:
    def change(tensors: tapped.Tensors) -> None:
        values, dtype = tensors["hidden_norm.weight"]
        tensors["hidden_norm.weight"] = (values * 1e38, dtype)

    target = tapped.write_target(tmp_path / "target")
    drafter = tapped.write_drafter(tmp_path / "drafter", "dflash", "old_shape", tensors=change)
    assert api.validate(target, drafter)["verdict"] not in PASSING


def test_a_layer_of_an_assistant_that_is_scaled_to_nothing_is_refused(tmp_path: Path) -> None:
    target, drafter = gemma(tmp_path)
    edit_tensors(drafter, altered("model.layers.0.layer_scalar", lambda words: words * 0))
    assert api.validate(target, drafter)["verdict"] not in PASSING


def test_taps_in_a_target_of_unknown_depth_are_not_in_range(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    edit_config(target, lambda config: config.pop("num_hidden_layers"))
    assert api.validate(target, drafter)["facts"]["taps"]["relation"] != "in range"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda facts: facts["hidden"].update(drafter=32), id="hidden width"),
        pytest.param(lambda facts: facts["drafter"].update(family="gemma4_assistant"), id="family"),
    ],
)
def test_facts_that_contradict_themselves_do_not_pass(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    facts = api.validate(*pair(tmp_path))["facts"]
    change(facts)
    try:
        verdict = api.judge_facts(facts)["verdict"]
    except Usage:
        return
    assert verdict not in PASSING


def test_a_key_that_a_facts_document_states_twice_is_not_passed_over(tmp_path: Path) -> None:
    text = json.dumps(api.validate(*pair(tmp_path))["facts"])
    twice = '"hidden": {"target": 64, "drafter": 32, "relation": "different"}, "hidden":'
    file = tmp_path / "facts.json"
    file.write_text(text.replace('"hidden":', twice, 1))
    assert (
        CliRunner().invoke(cli, ["validate", "--facts", str(file)], standalone_mode=False).return_value != 0
    )


def test_a_key_that_a_line_states_twice_is_wrong_usage(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    line = json.dumps({"drafter": str(drafter), "target": str(target)})
    twice = line.replace("{", '{"target": "another", ', 1)
    (result,) = api.validate_pairs([twice], jobs=1)
    assert result["exit_code"] == 2


@pytest.mark.parametrize("options", [["--draft-kind", "mtp"], ["--draft-block-size", "4"]])
def test_what_is_asked_of_a_drafter_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    target, _ = pair(tmp_path)
    assert run(["validate", str(target), *options]) == 2
    assert options[0] in capsys.readouterr().err


# False alarms.


def test_the_base_model_of_a_local_target_is_not_its_name(tmp_path: Path) -> None:
    """Qwen3-8B's own card calls Qwen3-8B-Base its base, and its drafters' cards call Qwen3-8B theirs."""
    target, drafter = pair(tmp_path)
    (target / "README.md").write_text("---\nbase_model:\n- Qwen/Qwen3-8B-Base\n---\n")
    (drafter / "README.md").write_text("---\nbase_model: Qwen/Qwen3-8B\n---\n")
    report = api.validate(target, drafter)
    assert "PAIR-CLAIM" not in found(report)
    assert report["verdict"] in PASSING


# Words that mislead.


def test_a_drafter_whose_card_names_its_target_is_not_said_to_name_none(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    (drafter / "README.md").write_text("---\nbase_model: owner/target\n---\n")
    report = api.validate(target, drafter)
    assert any("owner/target" in q["answer"] for q in report["questions"])
    note = found(report).get("PAIR-NO-PROVENANCE")
    assert note is None or "nothing says which target" not in note["message"]


def test_a_drafter_that_nobody_cut_is_not_sent_to_split_mtp(tmp_path: Path) -> None:
    note = found(api.validate(*pair(tmp_path))).get("PAIR-NO-PROVENANCE")
    assert note is None or "split-mtp" not in (note["hint"] or "")


def test_two_drafters_in_the_wrong_order_are_told_so_and_nothing_else(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    assert set(found(api.validate(drafter, target))) == {"PAIR-TARGET-ROLE"}


def test_a_drafter_given_twice_is_not_told_to_change_the_order(tmp_path: Path) -> None:
    _, drafter = pair(tmp_path)
    report = api.validate(drafter, drafter)
    assert set(found(report)) == {"PAIR-TARGET-ROLE"}
    assert "give the target first" not in (found(report)["PAIR-TARGET-ROLE"]["hint"] or "")


def test_a_pointer_in_place_of_the_weights_is_the_only_finding(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"
    (drafter / "model.safetensors").write_text(pointer)
    for report in (api.validate(drafter), api.validate(target, drafter)):
        assert set(found(report, "error")) == {"FILE-HEADER"}
        assert "states a header of" not in found(report)["FILE-HEADER"]["message"]


@pytest.mark.parametrize("other", [None, "model-Q4_K_M.gguf", "pytorch_model.bin"])
def test_a_folder_without_weights_is_said_to_have_none(tmp_path: Path, other: str | None) -> None:
    target, _ = pair(tmp_path)
    without_weights(target)
    if other:
        (target / other).write_bytes(bytes(100))
    told = " ".join(f"{f['message']} {f['hint']}" for f in api.validate(target)["findings"])
    assert "safetensors" in told
    assert other is None or other in told


def test_a_target_whose_drafter_is_broken_is_still_called_what_it_is(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    without_weights(drafter)
    result = CliRunner().invoke(cli, ["validate", str(target), str(drafter)], standalone_mode=False)
    (line,) = [line for line in result.output.splitlines() if line.startswith("target")]
    assert "no record of this family" not in line


def test_a_key_that_is_missing_is_not_called_a_wrong_number(tmp_path: Path) -> None:
    target, _ = pair(tmp_path)
    change = tapped.without("rms_norm_eps")
    drafter = tapped.write_drafter(tmp_path / "less", "dflash", "old_shape", change)
    message = found(api.validate(target, drafter), "error")["CONFIG-NUMBER"]["message"]
    assert "no such model can have this number" not in message


def test_a_folder_of_the_hubs_cache_is_told_apart_from_an_empty_one(tmp_path: Path) -> None:
    _, drafter = pair(tmp_path)
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(drafter, snapshot)
    with pytest.raises(ToolError) as caught:
        api.validate(tmp_path / "models--owner--name")
    assert "snapshots" in f"{caught.value.message} {caught.value.hint}"


# The action.

ACTION = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())
(SCRIPT,) = (step["run"] for step in ACTION["runs"]["steps"] if step["name"] == "Validate")


def step(folder: Path, **inputs: str) -> int:
    """The exit code of the action's step that validates the pair in a folder."""
    files = {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    given = {
        "TARGET": "target",
        "DRAFTER": "",
        "STRICT": "false",
        "FORMAT": "github",
        "SARIF_FILE": "",
        **inputs,
    }
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", SCRIPT]
    environment = {**os.environ, **files, **given, "PATH": search}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60).returncode


def test_the_action_writes_its_sarif_file_into_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    pair(tmp_path)
    step(tmp_path, SARIF_FILE="reports/draftpair.sarif")
    assert (tmp_path / "reports" / "draftpair.sarif").is_file()


def test_the_action_does_not_take_a_misspelt_strict_for_false(tmp_path: Path) -> None:
    pair(tmp_path)
    assert step(tmp_path, STRICT="yes") == 2
