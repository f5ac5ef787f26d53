"""draftpair as a library: a function for each command, each returning the report that the command prints.

Every function takes a folder, a ``.safetensors`` file, ``owner/name``, ``owner/name@revision`` or
``hf://owner/name[@revision]`` for a checkpoint. Errors are `draftpair.errors.ToolError` and its subclasses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.errors import Refused, ToolError, Usage
from draftpair.findings import by_severity
from draftpair.report import envelope, exit_code
from draftpair.runtime.options import Options
from draftpair.version import VERSION

if TYPE_CHECKING:
    from draftpair.convert import SplitPlan
    from draftpair.validate.batch import Line

Source = str | Path


def inspect(
    model: Source,
    drafter: Source | None = None,
    *,
    revision: str | None = None,
    context: int = 8192,
    batch: int = 1,
    kv_bits: int = 16,
    memory: str | None = None,
) -> dict[str, Any]:
    """Report on one checkpoint: role, head, integrity, sizes, memory. Raises Usage for an unreadable limit."""
    from draftpair.validate.inspection import inspect as look

    other = open_checkpoint(drafter) if drafter is not None else None
    body = look(
        open_checkpoint(model, revision), other, context=context, batch=batch, kv_bits=kv_bits, memory=memory
    )
    inputs = {
        "model": str(model),
        "drafter": None if drafter is None else str(drafter),
        "context": context,
        "batch": batch,
        "kv_bits": kv_bits,
        "memory": memory,
    }
    return envelope("inspect", inputs, body)


def split_mtp(
    model: Source,
    output: Source,
    *,
    revision: str | None = None,
    block_size: int | None = None,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str | None = None,
    q_overrides: Sequence[str] = (),
    dtype: str = "keep",
    norms: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    upload_repo: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Cut the head out of ``model`` into the folder ``output``, and report what was written.

    ``upload_repo`` is a repository of the Hub, ``owner/name`` or ``owner/name@branch``, that the folder is uploaded
    to once `validate` has nothing against it. ``progress`` is called with a phase, the bytes done and the bytes in
    all. Raises Usage for options or an output that cannot be used, Refused for a source that cannot be split;
    nothing is then written. What goes wrong with an upload leaves the folder in place.
    """
    from draftpair.convert import Request, carry_out, check_request, plan_split, split_body, split_inputs
    from draftpair.families.heads import find_head

    quantization = (q_bits, q_group_size, q_mode, tuple(q_overrides))
    request = Request(_output_path(output), block_size, *quantization, dtype, norms, force)
    check_request(request)
    if upload_repo is not None:
        from draftpair.checkpoint.hub.upload import check_upload

        check_upload(upload_repo)
    checkpoint = open_checkpoint(model, revision)
    plan = plan_split(checkpoint, find_head(checkpoint), request)
    body = split_body(plan if dry_run else carry_out(plan, progress))
    if upload_repo is not None and not dry_run:
        body["upload"] = _upload(plan, upload_repo, bars=progress is not None)
    return envelope("split-mtp", split_inputs(plan), body)


def _upload(plan: SplitPlan, repository: str, bars: bool) -> dict[str, Any]:
    """Uploads what a split wrote, unless `validate` has something against it."""
    from draftpair.checkpoint.hub.upload import upload_folder_to_hub
    from draftpair.convert.destination import is_superseded

    folder = plan.request.output
    _refuse_unsafe(plan.checkpoint, folder)
    done = upload_folder_to_hub(
        folder,
        plan.files,
        repository,
        message=f"{plan.family.name} by draftpair {VERSION}",
        superseded=is_superseded,
        bars=bars,
    )
    return asdict(done)


def _refuse_unsafe(source: Checkpoint, folder: Path) -> None:
    """Raises Refused for a drafter that is unsafe, alone or with the source it was cut from, ToolError for unknown."""
    from draftpair.checkpoint.fingerprint import is_incomplete
    from draftpair.validate import validate_one, validate_pair

    drafter = open_checkpoint(folder)
    verdicts = {f"{folder}": validate_one(drafter)}
    if not is_incomplete(source):
        verdicts[f"{source.source} {folder}"] = validate_pair(source, drafter)
    for names, verdict in verdicts.items():
        if verdict.name in ("unsafe", "unknown"):
            found = [f for f in by_severity(verdict.findings) if f.level != "note"]
            raise (Refused if verdict.name == "unsafe" else ToolError)(
                f"{folder} was written, and is not uploaded: validate calls it {verdict.name}: "
                + "; ".join(f"{finding.rule}: {finding.message}" for finding in found),
                hint=f"look at it with: draftpair validate {names}",
            )


def attach(
    model: Source,
    drafter: Source,
    output: Source,
    *,
    revision: str | None = None,
    link: bool = False,
    dry_run: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Put the head in the folder ``drafter`` back into the target ``model``, and write both to the folder ``output``.

    ``link`` makes hard links of the target's files instead of copies. Raises Refused when the two do not belong
    together or the target has a head, Usage for an output that cannot be used; nothing is then written.
    """
    from draftpair.convert.attach import attach_body, carry_out_attach, plan_attach
    from draftpair.validate import require_pair

    target, head = open_checkpoint(model, revision), open_checkpoint(drafter)
    family, verdict = require_pair(target, head)
    plan = plan_attach(target, head, family, _output_path(output), link)
    if not dry_run:
        carry_out_attach(plan, progress)
    inputs = {"model": str(model), "revision": target.revision, "drafter": str(drafter), "link": link}
    findings = by_severity([*plan.findings, *verdict.findings])
    told = {"verdict": verdict.name, "findings": [finding.as_dict() for finding in findings]}
    return envelope("attach", inputs, {**attach_body(plan, not dry_run), **told})


def _output_path(output: Source) -> Path:
    """The folder that is meant; `~` is the home folder, as in a model's name."""
    text = os.fspath(output)
    if not text or "\0" in text:
        raise Usage(f"--output is {text!r}, which is no path", hint="name the folder to write")
    return Path(os.path.expanduser(text))


def validate(
    target: Source,
    drafter: Source | None = None,
    *,
    draft_block_size: int | None = None,
    draft_kind: str | None = None,
    values: bool | None = None,
) -> dict[str, Any]:
    """The verdict on one checkpoint, or on a target and what drafts for it.

    The target given as its own drafter means the head in its files. ``draft_kind`` is the kind that is asked for.
    ``values`` says whether weights are looked at, besides headers, configs and tokenizers; where it is None, those on
    this machine are, and those on the Hub are not.
    """
    from draftpair.validate import validate_one, validate_pair

    if drafter is None and (draft_kind is not None or draft_block_size is not None):
        raise Usage("a draft kind or block size was given and no drafter", hint="give the drafter as well")
    first = open_checkpoint(target)
    if drafter is None:
        verdict = validate_one(first, values=values)
    else:
        second = open_checkpoint(drafter)
        verdict = validate_pair(first, second, draft_block_size, kind=draft_kind, values=values)
    return envelope("validate", verdict.inputs, verdict.body())


def judge_facts(document: Any) -> dict[str, Any]:
    """The verdict on a pair-facts document, whoever made it. Raises Usage for one that breaks its schema."""
    from draftpair.validate.foreign import judge

    verdict = judge(document)
    return envelope("validate", verdict.inputs, verdict.body())


def validate_pairs(
    lines: Iterable[str], *, values: bool | None = None, jobs: int | None = None
) -> Iterator[dict[str, Any]]:
    """The verdict on each pair of a list, one JSON object a line; see `draftpair.validate.batch`.

    The results come in the order of the lines, each valid against the schema ``validate-line``; a line that cannot be
    understood, or a pair that cannot be looked at, has an error in place of a report. ``jobs`` is the number of
    processes, None for one a processor.
    """
    from draftpair.validate.batch import validate_lines

    return validate_lines(lines, partial(_judge_line, values=values), jobs)


def _judge_line(line: Line, values: bool | None) -> dict[str, Any]:
    from draftpair.validate import validate_one, validate_pair
    from draftpair.validate.batch import failed, opened, parse_line

    asked = None
    try:
        asked = parse_line(line.text)
        target = opened(asked["target"])
        if asked["drafter"] is None:
            verdict = validate_one(target, values=values)
        else:
            drafter, width = opened(asked["drafter"]), asked["draft_block_size"]
            verdict = validate_pair(target, drafter, width, kind=asked["draft_kind"], values=values)
    except ToolError as error:
        return failed(line, asked, error)
    except Exception as error:  # noqa: BLE001 - for a line this is the outermost: the rest of the list goes on
        return failed(line, asked, ToolError(f"this is a bug in draftpair: {type(error).__name__}: {error}"))
    report = envelope("validate", verdict.inputs, verdict.body())
    return {
        "line": line.number,
        "input": asked,
        "exit_code": exit_code([report]),
        "report": report,
        "error": None,
    }


def generate(
    model: Source,
    prompt: str,
    draft_model: Source | None = None,
    *,
    draft_kind: str | None = None,
    draft_block_size: int | None = None,
    allow_doubtful: bool = False,
    options: Options | None = None,
    on_text: Callable[[str], None] = lambda piece: None,
    on_ids: Callable[[str, Sequence[int]], None] | None = None,
) -> dict[str, Any]:
    """Run ``model`` on ``prompt``, alone or with ``draft_model``.

    ``on_text`` gets the text as it is decided, ``on_ids`` the token ids of "prompt" and, at the end, "generated".
    Raises Refused for a pair that must not run, ToolError when a model does not load or mlx-lm is not installed.
    """
    from draftpair.validate.single import require_runnable

    runtime, options = require_runtime(), options or Options()
    if not isinstance(prompt, str):
        raise Usage(f"the prompt is {type(prompt).__name__}, not text")
    target = open_checkpoint(model)
    target.require_folder("generate")
    require_runnable(target)
    pair = None
    if draft_model is not None:
        from draftpair.validate import validated_pair

        drafter = open_checkpoint(draft_model)
        drafter.require_folder("generate")
        _refuse_embedded_head(target, drafter)
        pair = validated_pair(target, drafter, draft_block_size, allow_doubtful)
        _require_kind(draft_kind, pair.family.kind)
    elif draft_kind is not None or draft_block_size is not None:
        raise Usage("a draft kind or block size was given and no drafter", hint="give one with --draft-model")
    session = runtime.open_session(target, pair, options.dtype)
    ids = runtime.encode(session, prompt, options.chat_template)
    inputs = {
        "model": str(model),
        "draft_model": None if draft_model is None else str(draft_model),
        "prompt_tokens": len(ids),
        "max_tokens": options.max_tokens,
        "temp": options.temp,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": options.seed,
        "dtype": options.dtype,
    }
    body = runtime.run(session, ids, options, on_text)
    if on_ids:
        on_ids("prompt", ids)
        on_ids("generated", body["tokens"])
    return envelope("generate", inputs, body)


def require_runtime() -> Any:
    """The module that runs models. Raises ToolError, with the command that installs it, when it cannot be imported."""
    try:
        from draftpair.runtime import session
    except ImportError as error:
        raise ToolError(
            f"running models needs mlx and mlx-lm: {error}",
            hint='pip install "draftpair[cpu,run]" on Linux, "draftpair[run]" on macOS',
        ) from error
    return session


def _require_kind(asked: str | None, kind: str) -> None:
    """The kind of the environment or of the option must be the drafter's: there is one way to run it."""
    from draftpair.families import load_families

    kinds = sorted({family.kind for family in load_families().values()})
    if asked is not None and asked not in kinds:
        raise Usage(
            f"draft kind {asked!r} is not one that draftpair runs", hint=f"known kinds: {', '.join(kinds)}"
        )
    if asked is not None and asked != kind:
        raise Usage(f"draft kind {asked!r} was asked for, and the drafter is of kind {kind!r}")


def _refuse_embedded_head(target: Checkpoint, drafter: Checkpoint) -> None:
    """A drafter in the target's own folder would be its embedded head, which has to be split first."""
    from draftpair.families.heads import find_head

    if not drafter.is_same_as(target):
        return
    if find_head(target) is None:
        raise Refused(
            f"{target.source} was given as its own drafter, and it has no embedded MTP head",
            hint="give the folder of a drafter with --draft-model",
        )
    raise ToolError(
        f"{target.source} was given as its own drafter; an embedded head is not run in place yet",
        hint=f"split it first: draftpair split-mtp --model {target.source} --output DIR",
    )
