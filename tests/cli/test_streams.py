"""What happens to stdout and stderr when they are closed, full, or fed text that a terminal would obey."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftpair.cli import run
from draftpair.report.subjects import one_line
from fixtures.folders import Folders

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(redirection: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run draftpair with its streams redirected as a shell does."""
    command = f'"$0" -m draftpair "$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *args], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", ">&- 2>&- <&-"])
def test_with_closed_streams_the_exit_code_is_the_commands_own(folders: Folders, redirection: str) -> None:
    for checkpoint, code in ((folders.raw, 0), (folders.target, 1)):
        done = shell(redirection, "inspect", str(checkpoint), "--require-head")
        assert done.returncode == code
        assert "bug" not in done.stderr


def test_with_closed_stdout_a_split_is_written(folders: Folders) -> None:
    output = folders.raw.parent / "new"
    done = shell(">&-", "split-mtp", "-m", str(folders.raw), "-o", str(output))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(output)) == sorted(os.listdir(folders.drafter))


@FULL
@pytest.mark.parametrize("args", [["families"], ["schema"], ["env"], ["--help"], ["--version"]], ids=" ".join)
def test_a_report_that_cannot_be_written_is_an_error(args: list[str]) -> None:
    done = shell(">/dev/full", *args)
    assert done.returncode == 3
    error, hint = done.stderr.splitlines()
    assert error == "error: the report cannot be written: No space left on device"
    assert hint.startswith("hint: ")


@FULL
def test_after_a_split_a_lost_report_does_not_sound_like_a_lost_split(folders: Folders) -> None:
    output = folders.raw.parent / "new"
    done = shell(">/dev/full", "split-mtp", "-m", str(folders.raw), "-o", str(output), "--json")
    assert done.returncode == 3
    assert "what the command wrote to files is in place" in done.stderr
    assert (output / "model.safetensors").is_file()


@FULL
def test_messages_that_cannot_be_written_change_no_exit_code() -> None:
    assert shell("2>/dev/full", "inspect", "./absent").returncode == 3
    assert shell("2>/dev/full", "nonesuch").returncode == 2


@pytest.mark.parametrize(("hidden", "code"), [(64, 0), (32, 1)])
def test_a_reader_that_has_gone_hides_no_verdict(folders: Folders, hidden: int, code: int) -> None:
    folders.edit(folders.target, "config.json", lambda config: config.update(hidden_size=hidden))
    command = '(sleep 0.2; "$0" -m draftpair validate "$@"; echo $? >&2) | true'
    args = [sys.executable, str(folders.target), str(folders.drafter)]
    done = subprocess.run(["bash", "-c", command, *args], capture_output=True, text=True, check=False)
    assert done.stderr == f"{code}\n"


def test_a_reader_that_has_gone_ends_a_long_output(folders: Folders) -> None:
    command = '(sleep 0.2; "$0" -m draftpair quickstart; echo $? >&2) | true'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], capture_output=True, text=True, check=False
    )
    assert done.stderr == "0\n"


_ENDLESS = """
import sys, time
from pathlib import Path
import draftpair.schemas
from draftpair.checkpoint.folder import staged_folder
from draftpair.cli import main

def forever():
    with staged_folder(Path(sys.argv[1]), replace=False):
        print("ready", flush=True)
        time.sleep(60)

draftpair.schemas.schema_names = forever
main(["schema"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_request_to_end_cleans_up_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, error = process.communicate()
    assert (process.returncode, error) == (128 + number, f"terminated by {number.name}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_hangup_that_the_caller_ignores_stays_ignored() -> None:
    code = (
        "import signal; from draftpair.cli import main\n"
        "try: main(['schema'])\n"
        "finally: print(repr(signal.getsignal(signal.SIGHUP)))"
    )
    done = subprocess.run(
        ["bash", "-c", 'trap "" HUP; exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "SIG_IGN" in done.stdout


def test_half_of_a_surrogate_pair_is_printed_as_its_number(folders: Folders) -> None:
    folders.edit(folders.raw, "config.json", lambda config: config.update(model_type="\ud800"))
    done = shell("", "inspect", str(folders.raw))
    assert done.returncode == 0
    assert r"model_type \ud800" in done.stdout
    assert "UnicodeEncodeError" not in done.stderr


def test_a_name_that_is_not_utf8_can_be_inspected_and_split(folders: Folders) -> None:
    raw = folders.raw.rename(folders.raw.parent / os.fsdecode(b"raw-\xff"))
    output = folders.raw.parent / "new"
    done = shell("", "split-mtp", "-m", str(raw), "-o", str(output))
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads((output / "draftpair-manifest.json").read_text(encoding="utf-8"))
    assert manifest["source"]["name"] == r"raw-\xff"
    assert shell("", "inspect", str(raw)).returncode == 0


NASTY = "\x1b[31mred\nrole            drafter\r\x9b2J\u202e"


def test_no_value_of_a_checkpoint_reaches_the_terminal_as_a_command(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    folders.edit(folders.target, "config.json", lambda config: config.update(model_type=NASTY))
    assert run(["inspect", str(folders.target)]) == 0
    out = capsys.readouterr().out
    assert r"model_type \x1b[31mred\nrole            drafter\r\x9b2J\u202e" in out
    assert out.count("\nrole ") == 1
    assert all(line.isprintable() for line in out.splitlines())


def test_no_error_message_reaches_the_terminal_as_a_command(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = folders.target.rename(folders.target.parent / "a\x1b[31m\nb")
    assert run(["split-mtp", "-m", str(raw), "-o", str(folders.raw.parent / "new")]) == 1
    error = capsys.readouterr().err
    assert r"a\x1b[31m\nb has no tensor" in error
    assert all(line.isprintable() for line in error.splitlines())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GLM-4.7 é 模型", "GLM-4.7 é 模型"),
        ("é\n\x1b", r"é\n\x1b"),
        ("\ud800", r"\ud800"),
        ("\\n", "\\n"),
    ],
    ids=ascii,
)
def test_only_what_does_not_print_is_one_line(text: str, shown: str) -> None:
    assert one_line(text) == shown
