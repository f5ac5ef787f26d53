"""The card of a drafter: its fields, read back by huggingface_hub, and its words."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from draftpair.checkpoint import open_checkpoint
from draftpair.convert.card import CARD, inherited_fields, model_card, suggested_name
from draftpair.families import load_splits, split_family
from draftpair.families.record import SplitFamily
from draftpair.schemas import check, load_schema
from fixtures.glm4_moe_lite import write_checkpoint

GOLDEN = Path(__file__).parent / "golden" / "card.md"
COMMIT = "7a0b" * 10
REPOSITORY = "zai-org/GLM-4.7-Flash"


def tensor(dtype: str, *shape: int, steps: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape),
        "sources": ["x"],
        "transforms": list(steps),
        "blake3": "0" * 64,
    }


QUANTIZE = "quantize affine 4/64"
MANIFEST: dict[str, Any] = {
    "schema": "urn:draftpair:schema:manifest:1.0",
    "tool": {"name": "draftpair", "version": "0.1.0"},
    "family": "glm4_moe_lite_mtp",
    "maturity": "stable",
    "source": {
        "name": REPOSITORY,
        "revision": COMMIT,
        "prefixes": ["model.layers.47."],
        "fingerprint": {
            "headers_sha256": "a" * 64,
            "norms_sha256": "b" * 64,
            "norms": {"norm.weight": ["0123456789abcdef"]},
            "samples_sha256": "c" * 64,
            "config_sha256": "d" * 64,
        },
    },
    "block_size": {"value": 2, "from": "num_nextn_predict_layers + 1", "counts_bonus_token": True},
    "tap": "post_norm",
    "fusion": "embedding, hidden",
    "dtype": "keep",
    "quantization": {"mode": "affine", "bits": 4, "group_size": 64},
    "kept_full_precision": {
        "model.mtp_block.mlp.gate.weight": "router weight: a rounded router picks other experts",
        "model.enorm.weight": "a vector",
        "model.hnorm.weight": "a vector",
    },
    "tensors": {
        "lm_head.weight": tensor("U32", 154880, 256, steps=(QUANTIZE,)),
        "lm_head.scales": tensor("BF16", 154880, 32, steps=(QUANTIZE,)),
        "lm_head.biases": tensor("BF16", 154880, 32, steps=(QUANTIZE,)),
        "model.embed_tokens.weight": tensor("BF16", 154880, 2048),
        "model.enorm.weight": tensor("BF16", 2048),
        "model.hnorm.weight": tensor("BF16", 2048),
        "model.mtp_block.mlp.gate.weight": tensor("BF16", 64, 2048),
        "model.mtp_block.mlp.switch_mlp.up_proj.weight": tensor(
            "U32", 64, 1536, 256, steps=("stack", QUANTIZE)
        ),
    },
    "dropped": ["model.layers.47.self_attn.rotary_emb.inv_freq"],
    "files": {"config.json": "e" * 64, "LICENSE": "f" * 64},
}
INHERITED = {"license": "mit", "language": ["en", "zh"]}


@pytest.fixture
def glm() -> SplitFamily:
    found = split_family("glm4_moe_lite_mtp")
    assert isinstance(found, SplitFamily)
    return found


def changed(**values: Any) -> dict[str, Any]:
    """The manifest with other values; `source` is merged into its own."""
    manifest = {**copy.deepcopy(MANIFEST), **values}
    manifest["source"] = {**MANIFEST["source"], **values.get("source", {})}
    assert check(manifest, load_schema("manifest")) == []
    return manifest


def card(glm: SplitFamily, inherited: Any = INHERITED, engines: Any = (), **values: Any) -> str:
    return model_card(changed(**values), glm, inherited, engines).decode()


def fields(text: str) -> dict[str, Any]:
    """The front matter as huggingface_hub reads it."""
    read: dict[str, Any] = ModelCard(text).data.to_dict()
    return read


def test_the_whole_card(glm: SplitFamily) -> None:
    text = card(glm, engines=["mlxcel", "draftpair", "mlx-vlm"])
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_fields_of_a_quantized_drafter(glm: SplitFamily) -> None:
    assert fields(card(glm)) == {
        "library_name": "mlx",
        "base_model": REPOSITORY,
        "base_model_relation": "quantized",
        "license": "mit",
        "language": ["en", "zh"],
        "tags": ["mlx", "mtp", "speculative-decoding", "draft-model", "glm4_moe_lite_mtp"],
    }


def test_a_full_precision_head_has_no_relation_and_nothing_has_a_pipeline_tag(glm: SplitFamily) -> None:
    found = fields(card(glm, quantization=None, kept_full_precision={}))
    assert found["base_model"] == REPOSITORY
    assert not found.keys() & {"base_model_relation", "pipeline_tag"}


def test_a_folder_is_no_base_model(glm: SplitFamily) -> None:
    text = card(glm, source={"name": "GLM-4.7-Flash", "revision": None})
    assert not fields(text).keys() & {"base_model", "base_model_relation"}
    assert "of `GLM-4.7-Flash`, cut out" in text
    assert "huggingface.co" not in text


def test_a_card_without_licence_states_none(glm: SplitFamily) -> None:
    assert not fields(card(glm, inherited={})).keys() & {
        "license",
        "license_name",
        "license_link",
        "language",
    }


@pytest.mark.parametrize(
    ("link", "name", "stated"),
    [
        ("LICENSE", REPOSITORY, "LICENSE"),
        ("docs/TERMS.md", REPOSITORY, f"https://huggingface.co/{REPOSITORY}/blob/{COMMIT}/docs/TERMS.md"),
        ("docs/TERMS.md", "folder", None),
        ("https://x.org/terms", "folder", "https://x.org/terms"),
    ],
)
def test_a_link_to_the_licence_leads_somewhere(
    glm: SplitFamily, link: str, name: str, stated: str | None
) -> None:
    inherited = {"license": "other", "license_name": "x", "license_link": link}
    found = fields(card(glm, inherited, source={"name": name}))
    assert (found["license"], found["license_name"], found.get("license_link")) == ("other", "x", stated)


def test_values_that_yaml_would_take_for_others_stay_text(glm: SplitFamily) -> None:
    inherited = {"license": "no", "license_name": "1.0: a # b", "language": ["no", "on", "1"]}
    found = fields(card(glm, inherited))
    assert {key: found[key] for key in inherited} == inherited


def test_what_is_not_settled_is_repeated(glm: SplitFamily) -> None:
    notes = "nobody has measured it"
    assert f"**Experimental**: {notes}.\n" in card(replace(glm, notes=notes), maturity="experimental")
    assert "xperimental" not in card(replace(glm, notes=notes))


def test_commands_are_those_of_engines_that_run_the_family(glm: SplitFamily) -> None:
    text = card(glm, engines=["mlx-vlm"])
    assert "mlx_vlm.generate --model TARGET --draft-model DRAFTER --draft-kind mtp" in text
    assert "draftpair generate" not in text
    assert "mlxcel" not in text
    assert "No engine is known yet that runs `glm4_moe_lite_mtp` drafters." in card(glm)
    assert "\ndraftpair validate TARGET DRAFTER\n" in text


def test_a_width_that_does_not_count_the_bonus_token(glm: SplitFamily) -> None:
    text = card(glm, block_size={"value": 4, "from": "config.json", "counts_bonus_token": False})
    assert "4 tokens a round, so 4 proposals" in text


def test_what_is_borrowed_is_told(glm: SplitFamily) -> None:
    own = card(glm)
    assert "- **Embedding**: its own\n- **Output head**: its own\n" in own
    borrower = replace(glm, drafter=replace(glm.drafter, borrows=("embedding", "head")), rules=())
    assert "- **Embedding**: of the target\n- **Output head**: of the target\n" in card(borrower)


def test_modules_that_are_quantized_otherwise_are_named(glm: SplitFamily) -> None:
    other = {"mode": "mxfp8", "bits": 8, "group_size": 32}
    quantization = {**MANIFEST["quantization"], "lm_head": other, "eh_proj": False}
    text = card(glm, quantization=quantization)
    assert (
        "- **Quantization**: affine, 4 bits, groups of 64, but `lm_head` mxfp8, 8 bits, groups of 32\n"
        in text
    )


def test_long_lists_are_cut(glm: SplitFamily) -> None:
    names = {f"x{number}.weight": "a vector" for number in range(20)}
    assert "and 12 more: a vector" in card(glm, kept_full_precision=names)


def test_every_tap_and_fusion_a_record_may_name_has_words(glm: SplitFamily) -> None:
    """The taps and fusions of heads: a drafter of any other kind is not cut out, and has no card of ours."""
    drafter = load_schema("family-record")["properties"]["drafter"]["properties"]
    for tap in set(drafter["tap"]["enum"]) - {"layers", "none"}:
        for fusion in set(drafter["fusion"]["enum"]) - {"layers, concatenated", "none"}:
            text = card(glm, tap=tap, fusion=fusion)
            assert f"(`{tap}`)" in text
            assert f"(`{fusion}`)" in text


@pytest.mark.parametrize("name", sorted(load_splits()))
def test_every_family_has_a_card(name: str) -> None:
    record = split_family(name)
    text = card(record, family=name, maturity=record.maturity, tap=record.drafter.tap)
    assert fields(text)["tags"][-1] == name
    assert f"The {record.title} of [`{REPOSITORY}`]" in text
    assert (str(record.notes) in text) == (record.maturity == "experimental")


def test_a_name_cannot_write_the_card(glm: SplitFamily) -> None:
    evil = "a`\n\n# free tokens\n<script>|"
    text = card(glm, source={"name": evil, "revision": None, "prefixes": [evil]})
    assert "\n# free tokens" not in text
    assert text.count("`") % 2 == 0
    assert text.startswith("---\n")
    assert "\n# a-free-tokens-script-MTP-4bit\n" in text


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "GLM-4.7-Flash-MTP-4bit"),
        ({"quantization": {"mode": "affine", "bits": 8, "group_size": 32}}, "GLM-4.7-Flash-MTP-8bit"),
        ({"quantization": {"mode": "mxfp4", "bits": 4, "group_size": 32}}, "GLM-4.7-Flash-MTP-mxfp4"),
        (
            {"quantization": None, "tensors": {"a": tensor("F32", 9), "b": tensor("BF16", 99)}},
            "GLM-4.7-Flash-MTP-bf16",
        ),
        (
            {"quantization": None, "tensors": {"a": tensor("F32", 9), "b": tensor("BF16", 9)}},
            "GLM-4.7-Flash-MTP-fp32",
        ),
        ({"source": {"name": "me/x_1.5"}}, "x_1.5-MTP-4bit"),
        ({"source": {"name": "my model (copy)"}}, "my-model-copy-MTP-4bit"),
    ],
)
def test_the_name_is_the_customary_one(values: dict[str, Any], name: str) -> None:
    assert suggested_name(changed(**values)) == name


def read(tmp_path: Path, text: str | bytes) -> tuple[Any, list[Any]]:
    raw = write_checkpoint(tmp_path / "raw")
    (raw / CARD).write_bytes(text if isinstance(text, bytes) else text.encode())
    return inherited_fields(open_checkpoint(raw))


def test_licence_and_language_come_from_the_source(tmp_path: Path) -> None:
    text = (
        "---\nlicense: other\nlicense_name: glm\nlicense_link: LICENSE\nlanguage:\n- no\n- zh\n"
        "pipeline_tag: text-generation\ntags: [chat]\n---\n# GLM\n---\nlicense: fake\n---\n"
    )
    expected = {
        "license": "other",
        "license_name": "glm",
        "license_link": "LICENSE",
        "language": ["no", "zh"],
    }
    assert read(tmp_path, text) == (expected, [])
    assert read(tmp_path, text.replace("\n", "\r\n")) == (expected, [])


@pytest.mark.parametrize(
    "text",
    [
        "", "# no fields", "---\nlicense:\nlanguage: []\n---\n", "---\nlicense: null\nlanguage: {a: b}\n---\n",
        "---\nlicense: mit\n", "text\n---\nlicense: mit\n---\n", "---\nlicense: [[mit]]\n---", b"\xff\xfe---\n",
    ],
)  # fmt: skip
def test_nothing_is_made_of_a_card_that_states_nothing(tmp_path: Path, text: str | bytes) -> None:
    assert read(tmp_path, text) == ({}, [])


@pytest.mark.parametrize(
    "text", ["---\nlicense: [mit\n---\n", "---\njust words\n---\n", "---\n" + "[" * 2_000 + "\n---\n"]
)
def test_fields_that_are_no_yaml_are_told(tmp_path: Path, text: str) -> None:
    found, (finding,) = read(tmp_path, text)
    assert found == {}
    assert (finding.rule, finding.level, finding.where) == ("SPLIT-CARD-SOURCE", "warning", CARD)


def test_a_source_without_card_is_nothing_to_tell(tmp_path: Path) -> None:
    assert inherited_fields(open_checkpoint(write_checkpoint(tmp_path / "raw"))) == ({}, [])


def test_an_alias_bomb_is_no_bomb(tmp_path: Path) -> None:
    levels = "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)
    )
    text = f"---\na: &a [x]\n{levels}license: *m\n---\n"
    assert read(tmp_path, text) == ({}, [])
