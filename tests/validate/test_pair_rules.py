"""Every rule on pair facts, one by one: what breaks it, that it is the only one to break, and what facts answer.

The document is that of a pair of which nothing has to be said; each case changes a field or two of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.families import load_families
from draftpair.families.rules import apply_rules
from draftpair.schemas import load_schema
from draftpair.validate.questions import answers
from fixtures import glm4_moe_lite, qwen4_exp, tapped
from fixtures.published import TARGETS
from fixtures.published.releases import write_release
from fixtures.split_heads import Words, edit_tensors
from fixtures.tokenizers import write_tokenizer

Facts = dict[str, Any]
Changes = Mapping[str, Any]

# Rule id, its level, and the fields that break it.
BROKEN: list[tuple[str, str, Changes]] = [
    ("PAIR-FAMILY", "error", {"family/relation": "other"}),
    ("DRAFT-KIND", "error", {"kind/relation": "different"}),
    ("PAIR-HIDDEN-SIZE", "error", {"hidden/relation": "different", "hidden/drafter": 1}),
    ("PAIR-HIDDEN-SIZE", "error", {"hidden/relation": "unknown"}),
    ("PAIR-STREAMS", "error", {"streams/relation": "different"}),
    ("PAIR-VOCAB-SIZE", "error", {"vocabulary/relation": "different"}),
    ("PAIR-VOCAB-UNSTATED", "warning", {"vocabulary/relation": "unknown"}),
    ("PAIR-VOCAB-ROWS", "error", {"vocabulary/consistent": False}),
    ("PAIR-VOCAB-PADDED", "warning", {"vocabulary/relation": "padded"}),
    ("PAIR-TOKENIZER", "error", {"tokenizer/relation": "different"}),
    ("PAIR-TOKENIZER-PADDED", "note", {"tokenizer/relation": "padded"}),
    ("PAIR-TOKENIZER-UNKNOWN", "warning", {"tokenizer/relation": "unknown"}),
    ("PAIR-TOKENIZER-ABSENT", "note", {"tokenizer/relation": "absent"}),
    ("PAIR-TOKENIZER-PIPELINE", "warning", {"tokenizer/pipeline": ["normalizer"]}),
    ("PAIR-GEOMETRY", "error", {"geometry/relation": "different"}),
    ("PAIR-SETTINGS", "warning", {"settings/relation": "different"}),
    ("PAIR-LAYERS", "warning", {"layers/relation": "different"}),
    ("PAIR-LAYERS", "warning", {"layers/relation": "unknown"}),
    ("PAIR-TARGET-LAYERS", "error", {"taps/depth": "different"}),
    ("PAIR-TAPS", "error", {"taps/relation": "beyond"}),
    ("PAIR-TAPS", "error", {"taps/relation": "malformed"}),
    ("PAIR-TAPS-UNKNOWN", "warning", {"taps/relation": "unknown"}),
    ("PAIR-TAP-LAST", "note", {"taps/at_end": True}),
    ("PAIR-MASK", "error", {"mask/relation": "beyond"}),
    ("PAIR-MASK", "error", {"mask/relation": "missing"}),
    ("PAIR-MASK-SPECIAL", "warning", {"mask/special": "eos_token_id"}),
    ("PAIR-SHARED-KV", "error", {"shared_kv/relation": "different"}),
    ("PAIR-SHARED-KV", "error", {"shared_kv/relation": "missing"}),
    ("PAIR-SHARED-KV-UNKNOWN", "warning", {"shared_kv/relation": "unknown"}),
    ("PAIR-TARGET-WEIGHTS-UNKNOWN", "warning", {"target/dtypes": {}}),
    ("PAIR-BORROWED", "error", {"borrowed/relation": "missing"}),
    ("PAIR-BORROWED-PACKED", "note", {"borrowed/packed": ["embedding"]}),
    ("PAIR-COPY", "note", {"copies/different": ["head"], "provenance/relation": "none"}),
    ("PAIR-COPY", "note", {"copies/different": ["head"], "provenance/relation": "unknown"}),
    ("PAIR-ROPE", "warning", {"rope/relation": "different"}),
    ("PAIR-ROPE-SHARED", "error", {"rope/relation": "shared, different"}),
    ("PAIR-SPECIAL-IDS", "warning", {"special_ids/relation": "different"}),
    ("PAIR-DTYPE", "warning", {"dtype/relation": "drafter in float16"}),
    ("PAIR-DTYPE-TARGET", "note", {"dtype/relation": "target in float16"}),
    ("PAIR-ENGINES", "note", {"engines": []}),
    ("PAIR-BLOCK-SIZE", "error", {"block_size/in_range": False}),
    ("PAIR-BLOCK-DEPTH", "note", {"block_size/beyond_trained": True}),
    ("PAIR-PROVENANCE", "warning", {"provenance/relation": "different"}),
    ("PAIR-DERIVED", "note", {"provenance/relation": "derived"}),
    ("PAIR-PROVENANCE-PARTIAL", "note", {"provenance/relation": "unknown"}),
    ("PAIR-NO-PROVENANCE", "note", {"provenance/relation": "none", "drafter/published": False}),
    ("PAIR-NO-ORIGIN", "note", {"provenance/relation": "none"}),
    ("PAIR-CLAIM", "warning", {"claim/relation": "other"}),
    ("PAIR-CLAIM-UNPROVEN", "note", {"claim/relation": "same"}),
    ("PAIR-CLAIM-UNPROVEN", "note", {"claim/relation": "unknown"}),
    ("PAIR-LOOKALIKES", "note", {"lookalikes": "A and B have one geometry"}),
]
# What a case of PAIR-COPY says besides, because only an unproven copy is worth a word.
ALSO = {"none": {"PAIR-NO-ORIGIN"}, "unknown": {"PAIR-PROVENANCE-PARTIAL"}}

OF_SEVERAL_FACTS = {"PAIR-COPY", "PAIR-NO-PROVENANCE", "PAIR-NO-ORIGIN"}
"""Rules that no single field breaks."""

FINE: list[Changes] = [
    {"kind/relation": "same"},
    {"hidden/relation": "none"},
    {"streams/relation": "unknown"},
    {"layers/relation": "equal"},
    {"taps/depth": "unknown"},
    {"taps/relation": "none", "taps/depth": "none"},
    {"mask/relation": "none"},
    {"shared_kv/relation": "equal"},
    {"borrowed/relation": "unknown"},
    {"borrowed/relation": "none"},
    {"copies/different": ["head"], "provenance/relation": "same"},
    {"rope/relation": "equal"},
    {"special_ids/relation": "unknown"},
]

# The rules that a family puts in the place of common ones, or adds: the family, rule, level and fields.
OWN: list[tuple[str, str, str, Changes]] = [
    ("full_model", "PAIR-VOCAB-LARGER", "error", {"vocabulary/larger": "drafter"}),
    ("full_model", "PAIR-ROLLBACK", "error", {"rollback/relation": "not both"}),
    ("full_model", "PAIR-ROLLBACK-WINDOW", "note", {"rollback/relation": "windows"}),
    ("full_model", "PAIR-ROLLBACK-UNTOLD", "warning", {"rollback/relation": "unknown"}),
    ("laguna_dflash", "PAIR-VOCAB-SIZE", "error", {"vocabulary/relation": "padded"}),
    ("laguna_dflash", "PAIR-VOCAB-SIZE", "error", {"vocabulary/relation": "unknown"}),
    ("muse_glimmer_assistant", "PAIR-VOCAB-SIZE", "error", {"vocabulary/relation": "padded"}),
    ("muse_glimmer_assistant", "PAIR-VOCAB-UNSTATED", "note", {"vocabulary/relation": "unknown"}),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The facts of a pair, made such that no rule has anything to say of them."""
    folder: Path = tmp_path_factory.mktemp("pair")
    target = tapped.write_target(folder / "target")
    drafter = tapped.write_drafter(folder / "drafter", "dflash", "old_shape")
    facts: Facts = api.validate(target, drafter)["facts"]
    known = {"tokenizer/relation": "identical", "provenance/relation": "same", "rollback/relation": "both"}
    return changed(facts, {**known, "vocabulary/larger": "neither"})


def changed(facts: Facts, changes: Changes) -> Facts:
    """The facts with other values at these paths; a path that is not there is a mistake of the test."""
    copy = deepcopy(facts)
    for path, value in changes.items():
        *parents, key = path.split("/")
        level = reduce(dict.__getitem__, parents, copy)
        assert key in level
        level[key] = value
    return copy


def found(facts: Facts) -> dict[str, dict[str, Any]]:
    """Rule -> its finding, as `validate --facts` gives them."""
    return {finding["rule"]: finding for finding in api.judge_facts(facts)["findings"]}


def names(changes: Changes) -> str:
    return ", ".join(f"{path} {value}" for path, value in changes.items())


def test_nothing_is_said_of_a_sound_pair(sound: Facts) -> None:
    assert found(sound) == {}
    assert api.judge_facts(sound)["verdict"] == "proven"


@pytest.mark.parametrize(
    ("rule", "level", "changes"), [pytest.param(*case, id=f"{case[0]}: {names(case[2])}") for case in BROKEN]
)
def test_a_broken_rule_is_the_one_that_is_named(
    sound: Facts, rule: str, level: str, changes: Changes
) -> None:
    findings = found(changed(sound, changes))
    also = ALSO[changes["provenance/relation"]] if rule == "PAIR-COPY" else set()
    assert findings.keys() == {rule} | also
    assert findings[rule]["level"] == level
    assert "{/" not in findings[rule]["message"]
    pointer = next(iter(changes))
    if rule not in OF_SEVERAL_FACTS:
        assert findings[rule]["where"] == f"/{pointer}"


@pytest.mark.parametrize("changes", FINE, ids=names)
def test_what_does_not_apply_breaks_no_rule(sound: Facts, changes: Changes) -> None:
    assert found(changed(sound, changes)) == {}


def test_every_common_rule_has_a_case() -> None:
    assert {rule for rule, *_ in BROKEN} == {
        rule["rule"]["id"] for rule in load_schema("pair-rules")["allOf"]
    }


@pytest.mark.parametrize(
    ("family", "rule", "level", "changes"),
    [pytest.param(*case, id=f"{case[0]} {case[1]}: {names(case[3])}") for case in OWN],
)
def test_a_rule_of_one_family_is_applied_to_its_pairs(
    sound: Facts, family: str, rule: str, level: str, changes: Changes
) -> None:
    assert apply_rules(sound, family, "pair") == []
    levels = {f.rule: f.level for f in apply_rules(changed(sound, changes), family, "pair")}
    assert levels[rule] == level


def test_every_rule_of_one_family_has_a_case() -> None:
    own = {
        (family, rule["rule"]["id"])
        for family in load_families()
        for rule in load_schema(f"families/{family}")["$defs"]["pair"]["allOf"]
        if "rule" in rule
    }
    assert {(family, rule) for family, rule, *_ in OWN} == own


@pytest.mark.parametrize("family", load_families())
def test_every_pointer_of_a_rule_leads_to_a_fact(sound: Facts, family: str) -> None:
    own = load_schema(f"families/{family}")["$defs"]["pair"]["allOf"]
    for note in (rule["rule"] for rule in [*own, *load_schema("pair-rules")["allOf"]] if "rule" in rule):
        pointers = re.findall(r"\{/([^{}]*)\}", note["message"])
        pointers += [note[key].removeprefix("/") for key in ("expected", "found") if key in note]
        assert pointers
        for pointer in pointers:
            changed(sound, {pointer: None})


@pytest.mark.parametrize("family", load_families())
def test_the_common_rules_are_applied_to_pairs_of_every_family(sound: Facts, family: str) -> None:
    broken = changed(sound, {"family/relation": "other"})
    assert [finding.rule for finding in apply_rules(broken, family, "pair")] == ["PAIR-FAMILY"]


# What real folders come to, where no pair of another test does.


def said(target: Path, drafter: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Rule -> its finding, of a pair of folders."""
    return {finding["rule"]: finding for finding in api.validate(target, drafter, **options)["findings"]}


def edit(folder: Path, **values: Any) -> None:
    """Other values in a folder's config.json; None takes a key out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **values}
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A target, and a DFlash drafter made for it."""
    target = tapped.write_target(tmp_path / "target")
    return target, tapped.write_drafter(tmp_path / "drafter", "dflash", "old_shape")


def test_a_tokenizer_that_ends_later_is_a_note(folders: tuple[Path, Path]) -> None:
    target, drafter = folders
    write_tokenizer(drafter, tapped.VOCAB)
    path = drafter / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["model"]["vocab"]["one more"] = tapped.VOCAB
    path.write_text(json.dumps(document), encoding="utf-8")
    assert said(target, drafter)["PAIR-TOKENIZER-PADDED"]["level"] == "note"


@pytest.mark.parametrize("key", ["eos_token_id", "pad_token_id"])
def test_a_mask_that_is_a_special_token_of_the_target_is_told(folders: tuple[Path, Path], key: str) -> None:
    target, drafter = folders
    assert "PAIR-MASK-SPECIAL" not in said(target, drafter)
    edit(target, **{key: 120})
    assert key in said(target, drafter)["PAIR-MASK-SPECIAL"]["found"]


def test_half_precision_on_one_side_is_told_from_the_other_way_round(tmp_path: Path) -> None:
    target = tapped.write_target(tmp_path / "target")
    half = tapped.write_drafter(tmp_path / "half", "dflash", "old_shape", tensors=in_half_precision)
    assert said(target, half)["PAIR-DTYPE"]["found"] == "F16"


def in_half_precision(tensors: tapped.Tensors) -> None:
    tensors.update({name: (values, "F16") for name, (values, _) in tensors.items()})


@pytest.mark.parametrize(
    ("named", "relation"),
    [("qwen/target", "same"), ("example/other", "other"), ("/models/target", "unknown"), (None, "unknown")],
)
def test_the_card_of_a_drafter_is_held_against_the_name_of_the_target(
    folders: tuple[Path, Path], named: str | None, relation: str
) -> None:
    target, drafter = folders
    (drafter / "README.md").write_text("---\nbase_model:\n- Qwen/Target\n---\n", encoding="utf-8")
    edit(target, _name_or_path=named)
    report = api.validate(target, drafter)
    assert report["facts"]["claim"]["relation"] == relation
    assert ("PAIR-CLAIM" in {f["rule"] for f in report["findings"]}) == (relation == "other")


def test_a_config_of_speculators_names_its_verifier(tmp_path: Path) -> None:
    target = tapped.write_target(tmp_path / "target")
    drafter = tapped.write_drafter(tmp_path / "drafter", "dflash", "speculators")
    edit(target, _name_or_path="example/other")
    report = api.validate(target, drafter)
    claim = report["facts"]["claim"]
    assert (claim["relation"], claim["drafter"]) == ("other", ["example/target"])
    assert claim["from"] == "speculators_config.verifier of config.json"
    assert report["questions"][TRAINED]["answer"].startswith("example/target by speculators_config.verifier")


def test_a_target_with_other_streams_is_refused(tmp_path: Path) -> None:
    target = qwen4_exp.write_checkpoint(tmp_path / "target")
    api.split_mtp(target, tmp_path / "drafter")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text["hc_count"] += 1
    edit(target, **config)
    assert said(target, tmp_path / "drafter", values=False)["PAIR-STREAMS"]["level"] == "error"


def test_what_the_target_leaves_open_is_no_other_setting(tmp_path: Path) -> None:
    target = glm4_moe_lite.write_checkpoint(tmp_path / "target")
    api.split_mtp(target, tmp_path / "drafter")
    edit(target, norm_topk_prob=None)
    assert "PAIR-SETTINGS" not in said(target, tmp_path / "drafter")
    edit(target, norm_topk_prob=False)
    assert "norm_topk_prob" in said(target, tmp_path / "drafter")["PAIR-SETTINGS"]["message"]


def test_a_tap_that_is_named_twice_is_malformed(tmp_path: Path) -> None:
    drafter = tapped.write_drafter(
        tmp_path / "drafter", "dflash", "old_shape", tapped.nested(target_layer_ids=[0, 2, 2])
    )
    assert "do not increase" in tapped.errors(drafter)["DRAFTER-TAPS"].message


def test_of_a_head_in_its_own_target_nobody_asks_which_release_it_is_for(tmp_path: Path) -> None:
    target = write_release(tmp_path / "Qwen3.5-27B", TARGETS["Qwen3.5-27B"])
    report = api.validate(target, target, values=False)
    assert report["verdict"] == "proven"
    assert report["facts"]["lookalikes"] is None


def test_a_drafter_whose_tokenizer_has_more_ids_than_rows_is_refused(tmp_path: Path) -> None:
    target = tapped.write_target(tmp_path / "target")
    model = tapped.write_target(tmp_path / "model", tokens=tapped.VOCAB + 2)
    report = api.validate(target, model)
    assert not report["facts"]["vocabulary"]["consistent"]
    assert "PAIR-VOCAB-ROWS" in {f["rule"] for f in report["findings"] if f["level"] == "error"}


def test_a_target_that_does_not_count_its_layers_is_not_called_as_deep_as_it_should_be(
    folders: tuple[Path, Path],
) -> None:
    target, drafter = folders
    edit(target, num_hidden_layers=None)
    taps = api.validate(target, drafter)["facts"]["taps"]
    assert (taps["declared_layers"], taps["target_layers"], taps["depth"]) == (6, None, "unknown")


@pytest.mark.parametrize(
    ("drafter", "larger"),
    [(tapped.VOCAB - 8, "target"), (tapped.VOCAB + 8, "drafter"), (tapped.VOCAB, "neither")],
)
def test_a_model_may_draft_with_fewer_ids_than_its_target_and_not_with_more(
    tmp_path: Path, drafter: int, larger: str
) -> None:
    target = tapped.write_target(tmp_path / "target", tokens=tapped.VOCAB - 8)
    model = tapped.write_target(tmp_path / "model", vocab=drafter, tokens=tapped.VOCAB - 8)
    report = api.validate(target, model)
    assert report["facts"]["vocabulary"]["larger"] == larger
    assert ("PAIR-VOCAB-LARGER" in {f["rule"] for f in report["findings"]}) == (larger == "drafter")


def test_what_is_borrowed_from_a_quantized_target_is_told(folders: tuple[Path, Path]) -> None:
    target, drafter = folders
    assert "PAIR-BORROWED-PACKED" not in said(target, drafter)
    edit_tensors(target, packed_output)
    edit(target, quantization={"bits": 4, "group_size": 32})
    assert said(target, drafter)["PAIR-BORROWED-PACKED"]["found"] == ["head"]


def packed_output(tensors: Words) -> None:
    """Four bits instead of the output matrix; what they stand for does not matter here."""
    rows, columns = tensors["lm_head.weight"][0].shape
    tensors["lm_head.weight"] = (np.ones((rows, columns // 8), "<u4"), "U32")
    for side in ("scales", "biases"):
        tensors[f"lm_head.{side}"] = (np.ones((rows, columns // 32), "<u2"), "BF16")


# The six questions, answered from facts.

TRAINED, ENGINES, FITS, CONTRACT, PACKED, SPEED = range(6)


def answered(facts: Facts, drafter: Path) -> list[str]:
    return [entry["answer"] for entry in answers(facts, open_checkpoint(drafter))]


def test_the_answers_of_a_published_drafter(folders: tuple[Path, Path]) -> None:
    target, drafter = folders
    given = [entry["answer"] for entry in api.validate(target, drafter)["questions"]]
    assert given[TRAINED] == given[SPEED] == "not stated"
    assert given[ENGINES] == "dflash: mlx-vlm, mlxcel"
    assert given[FITS].startswith("tokenizer absent, vocabulary equal, hidden width equal, taps in range, ")
    assert "shared keys" not in given[FITS]
    assert "tap layers, positions: the block follows the committed tokens" in given[FITS]
    assert given[CONTRACT].startswith("8 rows to verify: the last accepted token and 7 proposals (block_size")
    assert "verification: all proposals of a block come from one forward" in given[CONTRACT]
    assert given[PACKED] == "no (BF16)"


@pytest.mark.parametrize(
    ("number", "changes", "answer"),
    [
        (
            TRAINED,
            {"provenance/source": "a/b", "provenance/revision": "1f", "provenance/relation": "derived"},
            "a/b at revision 1f: derived",
        ),
        (TRAINED, {"provenance/source": "a/b"}, "a/b at revision not stated: same"),
        (
            TRAINED,
            {"provenance/source": None, "claim/drafter": ["a/b", "c/d"], "claim/from": "its card"},
            "a/b or c/d by its card, which proves nothing; revision not stated",
        ),
        (ENGINES, {"engines": []}, "dflash: none that draftpair knows"),
        (
            PACKED,
            {"drafter/quantization": {"bits": 4, "group_size": 32}},
            "yes, MLX affine 4 bits, groups of 32",
        ),
        (
            PACKED,
            {"drafter/quantization": {"bits": 8, "group_size": 32, "mode": "mxfp8"}},
            "yes, MLX mxfp8 8 bits, groups of 32",
        ),
        (PACKED, {"drafter/quantization": {"quant_method": "fp8"}}, "yes, fp8 (BF16)"),
        (PACKED, {"drafter/quantization": {"quant_algo": "NVFP4"}}, "yes, NVFP4 (BF16)"),
        (PACKED, {"drafter/quantization": {}}, "yes, in a form not named (BF16)"),
        (PACKED, {"drafter/dtypes": {}}, "no (no tensors)"),
    ],
)
def test_each_answer_is_read_off_the_facts(
    sound: Facts, folders: tuple[Path, Path], number: int, changes: Changes, answer: str
) -> None:
    assert answered(changed(sound, changes), folders[1])[number] == answer


@pytest.mark.parametrize(
    ("key", "tail"), [("verification", "; verification: not stated"), ("position", ", tap layers")]
)
def test_what_no_record_says_is_not_stated(
    sound: Facts, folders: tuple[Path, Path], key: str, tail: str
) -> None:
    number = CONTRACT if key == "verification" else FITS
    assert answered(changed(sound, {key: None}), folders[1])[number].endswith(tail)


@pytest.mark.parametrize("text", ["120 tok/s", "80 tokens per second", "a speed-up of 2", "3x faster"])
def test_a_card_with_figures_of_speed_is_left_to_the_reader(
    sound: Facts, folders: tuple[Path, Path], text: str
) -> None:
    (folders[1] / "README.md").write_text(f"# A drafter\n\n{text}\n", encoding="utf-8")
    assert answered(sound, folders[1])[SPEED].startswith("README.md gives figures")
