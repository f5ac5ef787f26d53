"""`draftpair check`: single files, with what lies beside them, as a commit hook hands them over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftpair.cli import run
from draftpair.report import formats
from draftpair.schemas import check, load_schema
from fixtures.folders import Folders
from fixtures.safetensors_files import write_index, write_weights

INDEX = "model.safetensors.index.json"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"
TENSOR = ("F32", (2, 2))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, so that files are named as in a commit."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def model(here: Path) -> Path:
    """A checkpoint of two weight files, and an index that is right."""
    folder = here / "model"
    folder.mkdir()
    write_weights(folder / "model-00001-of-00002.safetensors", {"a.weight": TENSOR})
    write_weights(folder / "model-00002-of-00002.safetensors", {"b.weight": TENSOR})
    mapped = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    write_index(folder, mapped, total_size=32)
    return folder


def checked(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and report, held against its schema."""
    capsys.readouterr()
    code = run(["check", *map(str, args), "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert check(report, load_schema("check")) == []
    return code, report


def told(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Level and rule of everything that was found."""
    return [(finding["level"], finding["rule"]) for file in report["files"] for finding in file["findings"]]


def test_a_right_index_is_sound(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = checked(capsys, f"model/{INDEX}")
    assert (code, report["verdict"], told(report)) == (0, "sound", [])
    assert report["files"][0]["kind"] == "index"
    assert report["inputs"] == {"files": [f"model/{INDEX}"]}


def test_index_and_headers_are_compared_both_ways(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_weights(model / "model-00001-of-00002.safetensors", {"a.weight": TENSOR, "c.weight": TENSOR})
    mapped = {
        "a.weight": "model-00002-of-00002.safetensors",
        "b.weight": "model-00002-of-00002.safetensors",
        "d.weight": "model-00001-of-00002.safetensors",
    }
    write_index(model, mapped, total_size=7)
    code, report = checked(capsys, f"model/{INDEX}")
    assert (code, report["verdict"]) == (1, "unsafe")
    assert told(report) == [
        ("error", "INDEX-TENSOR-ELSEWHERE"),
        ("error", "INDEX-TENSOR-ABSENT"),
        ("warning", "INDEX-TENSOR-UNLISTED"),
        ("warning", "INDEX-TOTAL-SIZE"),
    ]
    places = [finding["where"] for finding in report["files"][0]["findings"]]
    assert places == [
        "model/model-00002-of-00002.safetensors",
        "model/model-00001-of-00002.safetensors",
        "model/model-00001-of-00002.safetensors",
        f"model/{INDEX}#/metadata/total_size",
    ]


def test_a_tensor_twice_and_a_file_that_no_index_names(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_weights(model / "mtp.safetensors", {"a.weight": TENSOR})
    code, report = checked(capsys, f"model/{INDEX}")
    assert code == 0
    assert told(report) == [("warning", "FILE-UNINDEXED"), ("warning", "TENSOR-DUPLICATE")]
    assert run(["check", f"model/{INDEX}", "--strict"]) == 1


@pytest.mark.parametrize("pointer", [False, True])
def test_weights_that_were_not_fetched_are_a_note(
    model: Path, capsys: pytest.CaptureFixture[str], pointer: bool
) -> None:
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_text(POINTER) if pointer else shard.unlink()
    code, report = checked(capsys, f"model/{INDEX}", "--strict")
    assert (code, report["verdict"], told(report)) == (0, "sound", [("note", "INDEX-SHARD-MISSING")])
    (finding,) = report["files"][0]["findings"]
    assert ("Git LFS pointer" in finding["message"]) == pointer
    assert finding["message"].startswith("1 of the 2 files that the index names")
    assert (finding["where"], finding["found"]) == (f"model/{INDEX}", [shard.name])


def test_without_any_weights_the_index_is_checked_alone(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    assert told(checked(capsys, f"model/{INDEX}")[1]) == [("note", "INDEX-SHARD-MISSING")]
    write_index(model, {"a.weight": "../elsewhere.safetensors", "b.weight": "model.safetensors"})
    code, report = checked(capsys, f"model/{INDEX}")
    assert (code, told(report)[0]) == (1, ("error", "INDEX-SHARD-PATH"))


def test_an_index_of_other_weights_is_stale(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    write_weights(model / "model.safetensors", {"a.weight": TENSOR})
    code, report = checked(capsys, f"model/{INDEX}")
    assert (code, told(report)) == (0, [("warning", "INDEX-STALE")])


def test_a_damaged_weight_file_is_an_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, report = checked(capsys, f"model/{INDEX}")
    assert (code, told(report)) == (1, [("error", "FILE-HEADER")])
    assert report["files"][0]["findings"][0]["where"] == "model/model-00002-of-00002.safetensors"


def test_an_index_by_another_name_is_called_by_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = "diffusion_pytorch_model.safetensors.index.json"
    (model / other).write_text('{"weight_map": 3}')
    code, report = checked(capsys, f"model/{other}")
    (finding,) = report["files"][0]["findings"]
    assert (code, finding["rule"], finding["where"]) == (1, "INDEX-NO-WEIGHT-MAP", f"model/{other}")
    assert finding["message"].startswith(other)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_a_file_that_is_a_pointer_itself_cannot_be_judged(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (here / name).write_text(POINTER)
    code, report = checked(capsys, name)
    assert (code, report["verdict"], told(report)) == (3, "unknown", [("warning", "FILE-LFS-UNKNOWN")])


@pytest.mark.parametrize(
    ("text", "code", "level", "rule", "pointer"),
    [
        ('{"hidden_size": 4,}', 1, "error", "CONFIG-PARSE", ""),
        ("[]", 1, "error", "CONFIG-PARSE", ""),
        ("", 1, "error", "CONFIG-PARSE", ""),
        ('{"hidden_size": 4, "hidden_size": 8}', 0, "warning", "CONFIG-PARSE", ""),
        ('{"limit": Infinity}', 0, "note", "CONFIG-PARSE", ""),
        ('{"text_config": 3}', 1, "error", "CONFIG-PARSE", "#/text_config"),
        (
            '{"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}',
            0,
            "warning",
            "CONFIG-ROPE-CONFLICT",
            "#/rope_theta",
        ),
        (
            '{"quantization": {"bits": 7, "group_size": 64}}',
            1,
            "error",
            "CONFIG-QUANTIZATION",
            "#/quantization",
        ),
        (
            '{"quantization": {"bits": 4, "group_size": 64, "mode": "mxfp4"}}',
            1,
            "error",
            "CONFIG-QUANTIZATION",
            "#/quantization",
        ),
        (
            '{"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 9, "group_size": 64}}}',
            1,
            "error",
            "CONFIG-QUANTIZATION",
            "#/quantization/lm_head",
        ),
        (
            '{"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 8}}',
            1,
            "error",
            "CONFIG-QUANTIZATION-TWINS",
            "#/quantization_config",
        ),
    ],
)
def test_what_is_wrong_with_a_config(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, level: str, rule: str, pointer: str
) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "config.json").write_text(text)
    got, report = checked(capsys, "sub/config.json")
    assert (got, told(report)) == (code, [(level, rule)])
    assert report["files"][0]["findings"][0]["where"] == f"sub/config.json{pointer}"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}',
        '{"quantization": {"bits": 6, "group_size": 64, "mode": null, "lm_head": false}}',
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}',
    ],
)
def test_configs_with_nothing_wrong(here: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (here / "config.json").write_text(text)
    code, report = checked(capsys, "config.json")
    assert (code, told(report), report["files"][0]["family"]) == (0, [], None)


def test_a_drafters_config_is_held_to_its_familys_rules(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folders.drafter / "config.json"
    code, report = checked(capsys, path)
    assert (code, told(report), report["files"][0]["family"]) == (0, [], "glm4_moe_lite_mtp")
    folders.edit(folders.drafter, "config.json", lambda config: config.update(block_size=1))
    code, report = checked(capsys, path)
    assert (code, told(report)) == (1, [("error", "CONFIG-BLOCK-SIZE")])
    assert report["files"][0]["findings"][0]["where"] == f"{path}#/block_size"


def test_a_drafters_settings_and_taps_are_judged_without_its_tensors(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_size": 64}
    config["dflash_config"] = {"mask_token_id": 5, "target_layer_ids": [3, 1]}
    config["quantization"] = {"bits": 4, "group_size": 100}
    (here / "config.json").write_text(json.dumps(config))
    code, report = checked(capsys, "config.json")
    assert (code, report["files"][0]["family"]) == (1, "dflash")
    rules = [rule for _, rule in told(report)]
    assert rules.count("CONFIG-QUANTIZATION") == 1
    assert "DRAFTER-TENSORS" not in rules


def test_files_of_other_names_are_refused_before_any_is_read(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "config.json").write_text("not JSON")
    (here / "tokenizer.json").write_text("{}")
    assert run(["check", "config.json", "tokenizer.json"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "tokenizer.json is neither a config.json nor a *.safetensors.index.json" in streams.err
    assert run(["check"]) == 2


def test_a_file_that_is_not_there_cannot_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "absent/config.json"]) == 3
    assert "absent/config.json cannot be read: No such file or directory" in capsys.readouterr().err


def test_each_file_has_its_verdict_and_the_worst_decides(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "config.json").write_text("[]")
    (model / "config.json").write_text(POINTER)
    code, report = checked(capsys, f"model/{INDEX}", "config.json", "model/config.json")
    assert [file["verdict"] for file in report["files"]] == ["sound", "unsafe", "unknown"]
    assert (code, report["verdict"]) == (1, "unsafe")
    assert run(["check", f"model/{INDEX}", "config.json", "model/config.json"]) == 1
    assert capsys.readouterr().out.split("\n")[:2] == [f"model/{INDEX}: sound", "config.json: unsafe"]


@pytest.mark.parametrize("form", formats())
def test_every_format_says_so(here: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    (here / "config.json").write_text('{\n  "text_config": 3\n}')
    assert run(["check", "config.json", "--format", form]) == 1
    out = capsys.readouterr().out
    assert "CONFIG-PARSE" in out
    line = {"sarif": '"startLine": 2', "github": "::error file=config.json,line=2,"}
    assert line.get(form, "text_config") in out


def test_the_jobs_summary_is_appended_to(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "config.json").write_text("[]")
    path = here / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert run(["check", "config.json", "--format", "json"]) == 1
    assert path.read_text() == "before\n"
    assert run(["check", "config.json", "--format", "github"]) == 1
    assert path.read_text().startswith("before\n### draftpair: unsafe\n")
    assert "| error | CONFIG-PARSE |" in path.read_text()
    capsys.readouterr()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(here))
    assert run(["check", "config.json", "--format", "github"]) == 1
    streams = capsys.readouterr()
    assert streams.out.startswith("::error ")
    assert "warning: the job's summary cannot be written" in streams.err
