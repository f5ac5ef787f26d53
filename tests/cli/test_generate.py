"""`generate` and `quickstart` as a user runs them: what is printed where, and what is refused before loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.cli import run
from draftpair.schemas import check, load_schema
from fixtures.folders import Folders
from fixtures.glm4_moe_lite_copy import write_copy_pair

PROMPT = ["--prompt", "t1 t2 t3", "--no-chat-template", "--max-tokens", "12"]


def generated(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["generate", *args, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert check(report, load_schema("generate")) == []
    return report


@pytest.mark.parametrize(
    "sampling", [[], ["--temp", "0.8", "--top-k", "12", "--seed", "7"]], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("drafter", ["drafter", "drafter_4bit"])
def test_the_drafter_changes_no_token(
    folders: Folders, capsys: pytest.CaptureFixture[str], drafter: str, sampling: list[str]
) -> None:
    plain = generated(capsys, "--model", str(folders.target), *PROMPT, *sampling)
    pair = ["--draft-model", str(getattr(folders, drafter)), "--draft-block-size", "4"]
    speculative = generated(capsys, "--model", str(folders.target), *pair, *PROMPT, *sampling)
    assert speculative["tokens"] == plain["tokens"]
    assert speculative["text"] == plain["text"]
    assert speculative["exactness"]["verdict"] == "exact"
    assert plain["exactness"]["verdict"] == "not_run"
    stats = speculative["stats"]
    assert (stats["block_size"], stats["block_size_from"]) == (4, "--draft-block-size")
    assert sum(stats["acceptance_histogram"].values()) == stats["rounds"] > 0
    assert (
        stats["proposed"]
        >= stats["accepted"]
        == sum(int(accepted) * rounds for accepted, rounds in stats["acceptance_histogram"].items())
    )
    assert plain["stats"]["rounds"] == 0


def test_a_copying_head_is_always_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_copy_pair(tmp_path / "raw", tmp_path / "target")
    assert run(["split-mtp", "-m", str(pair.raw), "-o", str(tmp_path / "drafter"), "--block-size", "4"]) == 0
    report = generated(
        capsys, "-m", str(pair.target), "--draft-model", str(tmp_path / "drafter"), "-p", "t1", "-n", "13"
    )
    assert report["stats"]["draft_acceptance_rate"] == 1.0
    assert report["stats"]["mean_acceptance_length"] == 4.0
    assert report["tokens"] == list(pair.continuation(1, 13))


def test_text_goes_to_stdout_and_figures_to_stderr(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    report = generated(capsys, "-m", str(folders.target), *PROMPT)
    pair = ["--draft-model", str(folders.drafter)]
    assert run(["generate", "-m", str(folders.target), *pair, *PROMPT, "--profile"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == report["text"].strip()
    assert "proposals accepted" in captured.err
    assert "prefill" in captured.err


def test_unsafe_and_unknown_pairs_do_not_run(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", str(folders.target), "--draft-model", str(folders.target), *PROMPT]) == 1
    assert "no tensor of an MTP head is in its files" in capsys.readouterr().err
    folders.edit(folders.target, "config.json", lambda config: config.update(rope_theta=5.0))
    args = ["generate", "-m", str(folders.target), "--draft-model", str(folders.drafter), *PROMPT]
    assert run(args) == 1
    assert "--allow-doubtful" in capsys.readouterr().err
    assert run([*args, "--allow-doubtful"]) == 0
    folders.edit(folders.drafter, "config.json", lambda config: config["text_config"].update(hidden_size=32))
    assert run([*args, "--allow-doubtful"]) == 1


def test_a_damaged_target_does_not_run(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    weights = folders.target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert run(["generate", "-m", str(folders.target), *PROMPT]) == 1
    assert "model.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "code", "text"),
    [
        (["--draft-kind", "dflash"], 1, "draft kind dflash was asked for, and this is a drafter of kind mtp"),
        (["--draft-kind", "medusa"], 2, "known kinds: dflash"),
        (["--draft-kind", "prompt-lookup"], 2, "needs no drafter"),
        (["--prompt-lookup"], 2, "needs no drafter"),
        (["--prompt-lookup", "--draft-kind", "mtp"], 2, "--draft-kind mtp"),
        (["--prompt-lookup-policy", "off"], 2, "add --prompt-lookup"),
        (["--prompt-lookup-ngram-max", "4"], 2, "add --prompt-lookup"),
        (["--prompt-lookup-ngram-max", "17"], 2, "1<=x<=16"),
        (["--draft-block-size", "1"], 2, "2 to 16"),
        (["--temp", "-1"], 2, "--temp"),
        (["--top-p", "1.5"], 2, "--top-p"),
        (["--temp", "1e-9"], 2, "temp is 1e-09; expected 0 (greedy)"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
        (["--repetition-penalty", "0"], 2, "repetition-penalty is 0.0; expected a number above 0"),
        (["--repetition-penalty", "nan"], 2, "repetition-penalty is nan"),
        (["--presence-penalty", "inf"], 2, "presence-penalty is inf"),
        (["--frequency-penalty", "nan"], 2, "frequency-penalty is nan"),
        (["--repetition-context-size", "0"], 2, "--repetition-context-size"),
        (["--logit-bias", "{"], 2, "it is not JSON"),
        (["--logit-bias", '["1"]'], 2, "expected token ids and numbers"),
        (["--logit-bias", '{"t1": 1}'], 2, "expected token ids and numbers"),
        (["--logit-bias", '{"1": "2"}'], 2, "expected token ids and numbers"),
        (["--logit-bias", '{"1": true}'], 2, "expected token ids and numbers"),
        (["--logit-bias", '{"1": NaN}'], 2, "NaN is not a JSON number"),
        (["--logit-bias", '{"1": 1, "1": 2}'], 2, "occurs twice"),
        (["--logit-bias", '{"1": 1e999}'], 2, "expected a finite number"),
        (["--logit-bias", '{"64": 1}'], 2, "token id 64; the vocabulary has the ids 0 to 63"),
        (["--stop", ""], 2, "stop is ('',); expected"),
        (["--stop", "\udcff"], 2, "valid UTF-8"),
        (["--dtype", "bfloat16"], 3, "float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(
    folders: Folders,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    code: int,
    text: str,
) -> None:
    if code == 2:  # nothing may be loaded before wrong usage is told
        monkeypatch.setattr("draftpair.runtime.session.load_target", None)
        monkeypatch.setattr("draftpair.runtime.session.load_pair", None)
    args = ["generate", "-m", str(folders.target), "--draft-model", str(folders.drafter), *PROMPT, *extra]
    assert run(args) == code
    assert text in capsys.readouterr().err


def test_the_environment_names_kind_and_width(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ["-m", str(folders.target), "--draft-model", str(folders.drafter)]
    monkeypatch.setenv("MLXCEL_DRAFT_BLOCK_SIZE", "3")
    assert generated(capsys, *pair, *PROMPT)["stats"]["block_size_from"] == "MLXCEL_DRAFT_BLOCK_SIZE"
    monkeypatch.setenv("LLAMA_ARG_DRAFT_KIND", "dflash")
    assert run(["generate", *pair, *PROMPT]) == 1
    assert run(["generate", *pair, *PROMPT, "--draft-kind", "mtp"]) == 0
    assert generated(capsys, "-m", str(folders.target), *PROMPT)["stats"]["draft_kind"] is None
    monkeypatch.setenv("LLAMA_ARG_DRAFT_KIND", "prompt-lookup")
    report = generated(capsys, "-m", str(folders.target), *PROMPT)
    assert (report["stats"]["draft_kind"], report["stats"]["block_size"]) == ("prompt-lookup", 3)


def test_draft_options_without_a_drafter_are_wrong_usage(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in (["--draft-kind", "mtp"], ["--draft-block-size", "3"]):
        assert run(["generate", "-m", str(folders.target), *PROMPT, *extra]) == 2
        assert "--draft-model" in capsys.readouterr().err


def test_a_drafter_is_not_run_alone(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", str(folders.drafter), *PROMPT]) == 1
    assert "give it with --draft-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("generation_config.json", "[1]", "generation_config.json is not a JSON object"),
        ("generation_config.json", '{"eos_token_id": [[1]]}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": "256"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id"),
        ("tokenizer.json", "[]", "tokenizer"),
    ],
)
def test_a_bad_file_is_named_and_no_bug(
    folders: Folders, capsys: pytest.CaptureFixture[str], file: str, text: str, message: str
) -> None:
    (folders.target / file).write_text(text)
    assert run(["generate", "-m", str(folders.target), *PROMPT]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "bug" not in error


@pytest.mark.parametrize(
    "template", ["{% for", "{{ raise_exception('only system') }}", "{{ 1/0 }}", "{{ messages[7].x }}"]
)
def test_a_chat_template_that_fails_is_named(
    folders: Folders, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    (folders.target / "chat_template.jinja").write_text(template)
    args = ["generate", "-m", str(folders.target), "--prompt", "t1", "--max-tokens", "2"]
    assert run(args) == 1
    assert "the chat template fails" in capsys.readouterr().err
    assert run([*args, "--no-chat-template"]) == 0


def test_weights_that_are_not_numbers_are_noticed(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = open_checkpoint(folders.target).tensors["lm_head.weight"]
    with (folders.target / tensor.file).open("r+b") as file:
        file.seek(tensor.begin)
        file.write(b"\xc0\x7f" * 64)
    assert run(["generate", "-m", str(folders.target), *PROMPT]) == 1
    assert "NaN" in capsys.readouterr().err


def test_a_prompt_that_is_no_text_is_wrong_usage(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-m", str(folders.target), "--prompt", "\udcff"]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_token_ids_can_be_printed(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = generated(capsys, "-m", str(folders.target), *PROMPT)
    monkeypatch.setenv("MLXCEL_PRINT_TOKEN_IDS", "1")
    run(["generate", "-m", str(folders.target), *PROMPT])
    error = capsys.readouterr().err
    assert f"prompt ids: {[1, 2, 3]}" in error
    assert f"generated ids: {report['tokens']}" in error


def test_quickstart_takes_a_pair_through_every_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["quickstart", "--keep", str(tmp_path / "toy")]) == 0
    out = capsys.readouterr().out
    assert out.count("defghijklmnopqrstuvwxyz abc") == 2
    assert "29 of 29 proposals accepted (100.0%)" in out
    assert "All 40 tokens are the same with and without the drafter." in out
    assert run(["inspect", str(tmp_path / "toy" / "raw"), "--require-head"]) == 0
    assert run(["quickstart", "--keep", str(tmp_path / "toy")]) == 2
