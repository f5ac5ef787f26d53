"""The card of a drafter folder, README.md: what the Hub shows, and what whoever finds the folder has to know.

Made of the manifest and the family's record alone, so the same split gives the same bytes. There is no
`pipeline_tag`: the Hub would offer a drafter as a model to chat with
(https://github.com/Blaizzy/nativ/pull/346). Licence and language are those of the source's own card.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from draftpair.checkpoint import Checkpoint, nbytes
from draftpair.checkpoint.card import CARD, card_fields
from draftpair.checkpoint.wording import count, printable
from draftpair.families.record import SplitFamily
from draftpair.findings import Finding

Fields = Mapping[str, str | list[str]]
"""Fields of a card's front matter."""

_TAGS = ("mlx", "mtp", "speculative-decoding", "draft-model")
_INHERITED = ("license", "license_name", "license_link", "language")
_ABSENT = ("", "~", "null", "Null", "NULL")
_SHOWN = 8

_HUB = "https://huggingface.co"
_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_TAPS = {
    "post_norm": "the target's last hidden state, after its final norm",
    "pre_norm": "the target's last hidden state, before its final norm",
    "streams": "all residual streams of the target's last layer, before they are mixed",
}
_FUSIONS = {
    "embedding, hidden": "the embedding of the newest token, then that hidden state, joined",
    "hidden, embedding": "that hidden state, then the embedding of the newest token, joined",
    "embedding + hidden": "the embedding of the newest token and that hidden state, each projected, added",
}
_HASHED = {
    "headers_sha256": "names, dtypes and shapes of all its tensors",
    "norms_sha256": "its norm weights",
    "samples_sha256": "samples of its other weights",
    "config_sha256": "its config.json",
}
_ENGINES = {
    "draftpair": "draftpair generate --model TARGET --draft-model DRAFTER",
    "mlx-vlm": "mlx_vlm.generate --model TARGET --draft-model DRAFTER --draft-kind {kind}",
    "mlxcel": "mlxcel generate --model TARGET --draft-model DRAFTER --draft-kind {kind}",
}


def model_card(
    manifest: Mapping[str, Any], family: SplitFamily, inherited: Fields, engines: Iterable[str]
) -> bytes:
    """The card of the drafter that `manifest` describes, as it is written to the file.

    `inherited` are the fields taken over from the source's card; `engines` are those that run drafters of the
    family: draftpair, mlx-vlm, mlxcel.
    """
    import yaml

    front = yaml.safe_dump(_fields(manifest, inherited), sort_keys=False, allow_unicode=True, width=1000)
    sections = (
        _introduction(manifest, family),
        _target(manifest),
        _running(family, engines),
        _content(manifest, family),
        _steps(manifest),
        _origin(manifest),
    )
    body = "\n\n".join("\n".join(lines) for lines in sections)
    return f"---\n{front}---\n\n{body}\n".encode()


def inherited_fields(checkpoint: Checkpoint) -> tuple[Fields, list[Finding]]:
    """Licence and language as the source's card states them; a warning when it cannot be understood."""
    fields = card_fields(checkpoint)
    if fields is None:
        return {}, [_unreadable()]
    return {key: fields[key] for key in _INHERITED if _is_stated(fields.get(key))}, []


def suggested_name(manifest: Mapping[str, Any]) -> str:
    """What a repository of this drafter is called by custom: `<base>-MTP-bf16`, `<base>-MTP-4bit`."""
    base = re.sub(r"[^A-Za-z0-9._]+", "-", manifest["source"]["name"].rpartition("/")[2]).strip("-.")
    return f"{base}-MTP-{_precision(manifest)}"


def _precision(manifest: Mapping[str, Any]) -> str:
    """Bits or mode of a quantization, else the dtype that most of the bytes have."""
    if quantization := manifest["quantization"]:
        affine = quantization["mode"] == "affine"
        return f"{quantization['bits']}bit" if affine else str(quantization["mode"])
    sizes: Counter[str] = Counter()
    for tensor in manifest["tensors"].values():
        sizes[tensor["dtype"]] += nbytes(tensor["dtype"], tensor["shape"])
    dtype = sizes.most_common(1)[0][0]
    return _DTYPES.get(dtype, dtype.lower())


def _is_stated(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(item, str) and item not in _ABSENT for item in values)


def _unreadable() -> Finding:
    return Finding(
        "SPLIT-CARD-SOURCE",
        "warning",
        f"the fields at the head of the source's {CARD} are no YAML; the drafter's card states no licence",
        where=CARD,
        hint=f"add the licence to the drafter's {CARD}, or mend the source's and split again",
    )


def _fields(manifest: Mapping[str, Any], inherited: Fields) -> dict[str, Any]:
    fields: dict[str, Any] = {"library_name": "mlx"}
    repository = _repository(manifest)
    if repository:
        fields["base_model"] = repository
    if repository and manifest["quantization"]:
        # The Hub knows no word for a drafter, only adapter, finetune, merge and quantized.
        fields["base_model_relation"] = "quantized"
    fields |= {key: inherited[key] for key in _INHERITED if key in inherited}
    link = fields.get("license_link")
    if isinstance(link, str) and "://" not in link and link not in manifest["files"]:
        del fields["license_link"]  # of the source's folder, and not copied
        if repository:
            fields["license_link"] = f"{_HUB}/{repository}/blob/{_revision(manifest)}/{link}"
    return fields | {"tags": [*_TAGS, manifest["family"]]}


def _repository(manifest: Mapping[str, Any]) -> str | None:
    """The source's name when it is one on the Hub: a folder's has no slash."""
    name: str = manifest["source"]["name"]
    return name if "/" in name else None


def _revision(manifest: Mapping[str, Any]) -> str:
    return manifest["source"]["revision"] or "main"


def _introduction(manifest: Mapping[str, Any], family: SplitFamily) -> Iterator[str]:
    repository, source = _repository(manifest), _code(manifest["source"]["name"])
    link = f"[{source}]({_HUB}/{repository}/tree/{_revision(manifest)})" if repository else source
    yield f"# {suggested_name(manifest)}"
    yield ""
    yield f"The {family.title} of {link}, cut out as a drafter for speculative decoding with MLX."
    yield ""
    yield "**This is not a model that runs alone.** It reads the hidden states of its target and proposes tokens,"
    yield "and the target checks each of them."
    if manifest["maturity"] == "experimental":
        yield ""
        yield f"**Experimental**: {family.notes or 'what is known of this family is not settled'}."


def _target(manifest: Mapping[str, Any]) -> Iterator[str]:
    yield "## Its target"
    yield ""
    yield f"{_code(manifest['source']['name'])}, or any quantization of it, whoever made it: quantizing changes"
    yield "neither a model's sizes nor its vocabulary nor its norms, so the drafter meets the hidden states that it was"
    yield "trained on, a little rounded. The target checks every proposal: rounding can cost accepted proposals, and"
    yield "does not change what is generated. A fine-tune, or another release of the same size, is another model."
    yield ""
    yield "Whether a target and this drafter belong together is seen from their files, before anything is loaded:"
    yield ""
    yield from _command("draftpair validate TARGET DRAFTER")


def _running(family: SplitFamily, engines: Iterable[str]) -> Iterator[str]:
    yield "## To run the pair"
    known = sorted(set(engines))
    if not known:
        yield ""
        yield f"No engine is known yet that runs `{family.drafter.model_type}` drafters."
    for engine in known:
        yield ""
        yield f"{engine}:"
        yield ""
        yield from _command(_ENGINES[engine].format(kind=family.kind) + ' --prompt "Why is the sky blue?"')


def _content(manifest: Mapping[str, Any], family: SplitFamily) -> Iterator[str]:
    width, tensors = manifest["block_size"], manifest["tensors"]
    size = sum(nbytes(tensor["dtype"], tensor["shape"]) for tensor in tensors.values())
    proposals = width["value"] - width["counts_bonus_token"]
    counts = ", the target's own token among them" if width["counts_bonus_token"] else ""
    borrowed = family.borrows(tensors)
    yield "## What it is"
    yield ""
    yield f"- **Family**: `{manifest['family']}`, `model_type` `{family.drafter.model_type}`"
    yield f"- **Reads**: {_TAPS[manifest['tap']]} (`{manifest['tap']}`)"
    yield f"- **Fuses**: {_FUSIONS[manifest['fusion']]} (`{manifest['fusion']}`)"
    for role, words in (("embedding", "Embedding"), ("head", "Output head")):
        yield f"- **{words}**: {'of the target' if role in borrowed else 'its own'}"
    yield (
        f"- **Block width**: {width['value']} tokens a round{counts}, so {count(proposals, 'proposal')} "
        f"(`{family.drafter.block_size.key}` in `config.json`, from {_code(width['from'])})"
    )
    yield f"- **Tensors**: {len(tensors):,}, {size:,} bytes"
    yield f"- **Quantization**: {_quantization(manifest)}"


def _quantization(manifest: Mapping[str, Any]) -> str:
    quantization = manifest["quantization"]
    if quantization is None:
        return "none"
    others = [f"{_code(name)} {_packing(q)}" for name, q in quantization.items() if isinstance(q, Mapping)]
    return _packing(quantization) + (f", but {', '.join(sorted(others))}" if others else "")


def _packing(quantization: Mapping[str, Any]) -> str:
    return f"{quantization['mode']}, {quantization['bits']} bits, groups of {quantization['group_size']}"


def _steps(manifest: Mapping[str, Any]) -> Iterator[str]:
    yield "### What was done to the tensors"
    yield ""
    steps = Counter(tuple(tensor["transforms"]) for tensor in manifest["tensors"].values())
    for transforms, number in sorted(steps.items()):
        yield f"- {count(number, 'tensor')}: {_codes(transforms, ', then ') or 'copied byte for byte'}"
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(manifest["kept_full_precision"].items()):
        reasons.setdefault(reason, []).append(name)
    if reasons:
        yield ""
        yield "Not quantized:"
        yield ""
        for reason, names in reasons.items():
            yield f"- {_some(names)}: {printable(reason, 1000)}"
    if manifest["dropped"]:
        yield ""
        yield f"Left out: {_some(manifest['dropped'])}"


def _origin(manifest: Mapping[str, Any]) -> Iterator[str]:
    source = manifest["source"]
    yield "## Where it comes from"
    yield ""
    yield f"- **Source**: {_code(source['name'])}"
    yield f"- **Commit**: {_code(source['revision']) if source['revision'] else 'not known, a local folder'}"
    yield f"- **Head**: the tensors {_some([f'{prefix}*' for prefix in source['prefixes']])}"
    for key, what in _HASHED.items():
        if digest := source["fingerprint"][key]:
            yield f"- **SHA-256 of {what}**: `{digest}`"
    tool = manifest["tool"]
    yield ""
    yield f"Written by {tool['name']} {tool['version']}. `draftpair-manifest.json` has the sources, the steps and the"
    yield "BLAKE3 hash of every tensor; `draftpair validate` holds drafter and target against it."


def _command(line: str) -> Sequence[str]:
    return "```sh", line, "```"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return _codes(names[:_SHOWN], ", ") + (f" and {more:,} more" if more > 0 else "")


def _codes(texts: Iterable[str], between: str) -> str:
    return between.join(map(_code, texts))


def _code(text: str) -> str:
    """Text of the source as code: it must neither end the span nor the line."""
    return f"`{printable(text).replace('`', chr(39))}`"
