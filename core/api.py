"""draftpair as a library: a function for each command, each returning the report that the command prints.

Every function takes a folder, a ``.safetensors`` file, ``owner/name``, ``owner/name@revision`` or
``hf://owner/name[@revision]`` for a checkpoint. Errors are `draftpair.errors.ToolError` and its subclasses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.errors import Refused, ToolError, Usage
from draftpair.findings import by_severity
from draftpair.report import envelope, exit_code
from draftpair.runtime.options import LOOKUP, Interrupted, Options
from draftpair.version import VERSION

if TYPE_CHECKING:
    from draftpair.convert import SplitPlan
    from draftpair.families.heads import HeadMatch
    from draftpair.runtime.session import Session
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

    ``draft_model`` given as ``model`` itself means the head in its files; the kind "prompt-lookup" needs none.
    ``on_text`` gets the text as it is decided, ``on_ids`` the token ids of "prompt" and, at the end, "generated".
    Raises Refused for a pair that must not run, ToolError when a model does not load or mlx-lm is not installed, and
    `draftpair.runtime.options.Interrupted`, which has the report so far, for Ctrl-C while it generates.
    """
    runtime, options = require_runtime(), options or Options()
    if not isinstance(prompt, str):
        raise Usage(f"the prompt is {type(prompt).__name__}, not text")
    session = _open_session(model, draft_model, draft_kind, draft_block_size, allow_doubtful, options)
    ids = runtime.encode(session, prompt, options.chat_template)
    inputs = {
        "model": str(model),
        "draft_model": None if draft_model is None else str(draft_model),
        "prompt_tokens": len(ids),
        "draft_kind": draft_kind,
        "draft_block_size": draft_block_size,
        **options.report(),
    }
    try:
        body = runtime.run(session, ids, options, on_text)
    except Interrupted as stop:
        raise Interrupted(envelope("generate", inputs, stop.report)) from None
    if on_ids:
        on_ids("prompt", ids)
        on_ids("generated", body["tokens"])
    return envelope("generate", inputs, body)


def bench(
    model: Source,
    draft_model: Source | None = None,
    *,
    draft_kind: str | None = None,
    draft_block_size: int | None = None,
    allow_doubtful: bool = False,
    prompts: Source | None = None,
    runs: int = 3,
    options: Options | None = None,
    on_run: Callable[[int, str, int], None] = lambda prompt, kind, run: None,
) -> dict[str, Any]:
    """Run ``model`` alone and with what drafts for it, in turn, and compare speeds and token ids.

    ``prompts`` is a file of prompts, a built-in set where None; ``runs`` is how often each is run in each way, besides
    once for warming up. ``on_run`` is told of each run that begins: the number of its prompt, "plain" or "speculative",
    and its own number, 0 for warming up. Raises what `generate` does, and Usage for a file that gives no prompts,
    before anything is loaded. Ctrl-C leaves no report. `draftpair.report.svg` draws one.
    """
    require_runtime()
    from draftpair.runtime import bench as benchmark

    options = options or Options()
    if draft_model is None and draft_kind is None:
        raise Usage("there is nothing to compare with", hint="give --draft-model, or --prompt-lookup")
    texts = benchmark.PROMPTS if prompts is None else benchmark.read_prompts(Path(prompts))
    session = _open_session(model, draft_model, draft_kind, draft_block_size, allow_doubtful, options)
    body = benchmark.bench(session, texts, options, runs, on_run=on_run)
    inputs = {
        "model": str(model),
        "draft_model": None if draft_model is None else str(draft_model),
        "draft_kind": draft_kind,
        "draft_block_size": draft_block_size,
        "prompts": None if prompts is None else str(prompts),
        "runs": runs,
        **options.report(),
    }
    return envelope("bench", inputs, body)


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


def _open_session(
    model: Source,
    draft_model: Source | None,
    draft_kind: str | None,
    draft_block_size: int | None,
    allow_doubtful: bool,
    options: Options,
) -> Session:
    """Everything that is asked for checked, then loaded."""
    from draftpair.validate.single import require_runnable

    runtime = require_runtime()
    _check_draft(draft_model, draft_kind, draft_block_size, options)
    target = open_checkpoint(model)
    target.require_folder("generate")
    require_runnable(target)
    vocabulary = target.config.get("vocab_size")
    if type(vocabulary) is int:
        options.require_vocabulary(vocabulary)
    if draft_model is not None:
        return _open_pair(target, draft_model, draft_kind, draft_block_size, allow_doubtful, options.dtype)
    session: Session
    if draft_kind == LOOKUP:
        session = runtime.open_lookup(target, draft_block_size, options)
    else:
        session = runtime.open_session(target, None, options.dtype)
    return session


def _check_draft(
    draft_model: Source | None, draft_kind: str | None, draft_block_size: int | None, options: Options
) -> None:
    """Raises Usage for an unknown kind, and for what asks for a drafter, or for prompt lookup, where there is none."""
    from draftpair.families import load_families

    kinds = sorted({LOOKUP, *(family.kind for family in load_families().values())})
    if draft_kind is not None and draft_kind not in kinds:
        raise Usage(
            f"draft kind {draft_kind!r} is not one that draftpair runs",
            hint=f"known kinds: {', '.join(kinds)}",
        )
    if draft_kind == LOOKUP:
        if draft_model is not None:
            raise Usage(
                f"draft kind {LOOKUP} needs no drafter, and {draft_model} was given", hint="give one of them"
            )
        return
    if options.prompt_lookup_ngram_max is not None or options.prompt_lookup_policy is not None:
        raise Usage(
            "an option of prompt lookup was given, and prompt lookup was not asked for", "add --prompt-lookup"
        )
    if draft_model is None and (draft_kind is not None or draft_block_size is not None):
        raise Usage("a draft kind or block size was given and no drafter", hint="give one with --draft-model")


def _open_pair(
    target: Checkpoint,
    draft_model: Source,
    kind: str | None,
    block_size: int | None,
    allow_doubtful: bool,
    dtype: str,
) -> Session:
    """The pair, once its verdict lets it run. A head in the files of a whole model is cut out for the loading."""
    from draftpair.validate import validated_pair
    from draftpair.validate.draft import Draft, find_draft

    runtime, drafter = require_runtime(), open_checkpoint(draft_model)
    drafter.require_folder("generate")
    pair = validated_pair(target, drafter, block_size, allow_doubtful, kind=kind)
    draft = find_draft(target, drafter, kind)
    session: Session
    if isinstance(draft, Draft) and draft.head is not None:
        with _cut_head(drafter, draft.head) as cut:
            loaded = validated_pair(target, cut, block_size, allow_doubtful, kind=kind)
            session = runtime.open_session(target, loaded, dtype)
        session.findings = runtime.noted(
            pair.verdict.findings
        )  # of what was given, not of a folder that is gone
    else:
        session = runtime.open_session(target, pair, dtype)
    return session


@contextmanager
def _cut_head(checkpoint: Checkpoint, head: HeadMatch) -> Iterator[Checkpoint]:
    """The head as a drafter's folder of its own, for as long as it is needed."""
    from draftpair.convert import Request, carry_out, plan_split

    with TemporaryDirectory(prefix="draftpair-") as folder:
        output = Path(folder) / "head"
        carry_out(plan_split(checkpoint, head, Request(output)))
        yield open_checkpoint(output)
