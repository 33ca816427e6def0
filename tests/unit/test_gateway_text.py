"""Reading a model's text side, and that templates and tokens equal transformers'."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import TEMPLATE, byte_level_tokenizer, metaspace_tokenizer
from tokenizers.processors import TemplateProcessing

from flexslurm.cli.model_prepare import cache_dir
from flexslurm.errors import InvalidRequest, ModelError
from flexslurm.gateway.chat_template import ChatTemplate
from flexslurm.gateway.text import SamplingDefaults, TextModel

SYSTEM = {"role": "system", "content": "Be  brief. "}
USER = {"role": "user", "content": "What's <b>1 & 1</b>?\n\n{{ 7 }} 🎉"}
ASSISTANT = {"role": "assistant", "content": "Two"}
CHATS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT]]


def write_model(
    path: Path,
    settings: dict[str, Any] | None = None,
    *,
    before: str | None = None,
    **files: dict[str, Any],
) -> Path:
    """A checkpoint directory without weights: the byte-level tokenizer and these settings."""
    path.mkdir(exist_ok=True)
    tokenizer = byte_level_tokenizer()
    if before:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{before} $A",
            pair=f"{before} $A $B",
            special_tokens=[(before, tokenizer.token_to_id(before))],
        )
    tokenizer.save(str(path / "tokenizer.json"))
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    everything = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **(settings or {})}
    (path / "tokenizer_config.json").write_text(json.dumps(everything))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def transformers_tokenizer(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(path))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """A published model's directory, where there is one."""
    given = os.environ.get("FLEXSLURM_TEST_MODEL")
    path = Path(given) if given else cache_dir() / "models" / "smollm2"
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"no model at {path}; FLEXSLURM_TEST_MODEL may name one")
    return path


# ------------------------------------------------------------------------- equal to transformers

TEMPLATES = {
    "plain": TEMPLATE,
    "special tokens": (
        "{{ bos_token }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    ),
    "blocks": """
{%- for message in messages %}
    {%- if message.role == 'system' %}
<<{{ message.content | trim }}>>
    {% else %}
      {{ message.role | upper }}: {{ message.content }}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %} GO {%- endif %}""",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ ns.s }}"
    ),
    "macros": (
        "{% macro say(m) %}[{{ m.role }}|{{ m.content }}]{% endmacro %}"
        "{% for m in messages[::-1] %}{{ say(m) }}{% endfor %}"
    ),
    "undefined": (
        "{{ nothing }}{{ messages[0].nothing }}{% if tools %}T{% endif %}"
        "{% if tools is none %}N{% endif %}"
    ),
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m", {"chat_template": TEMPLATES[name]})
    ours = TextModel.load(path).chat_template
    theirs = transformers_tokenizer(path)
    assert ours is not None
    for chat in CHATS:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=prompt
            )
            assert ours.render(chat, add_generation_prompt=prompt) == expected


def test_the_published_models_chats_and_texts_equal_transformers(real_model: Path) -> None:
    ours = TextModel.load(real_model)
    theirs = transformers_tokenizer(real_model)
    assert ours.chat_template is not None
    for chat in CHATS:
        for prompt in (True, False):
            text = ours.chat_template.render(chat, add_generation_prompt=prompt)
            assert text == theirs.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=prompt
            )
            tokens = theirs.apply_chat_template(
                chat, add_generation_prompt=prompt, return_dict=False
            )
            assert ours.encode(text, add_special_tokens=False) == tokens
    for text in ("Gravity is", "  naïve\n\n🎉 你好 ", "", "x" * 1000):
        for special in (True, False):
            tokens = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == tokens
        detokenizer = ours.detokenizer(skip_special=True)
        pieces = [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]
        assert "".join(pieces) == theirs.decode(tokens, skip_special_tokens=True)
    assert theirs.eos_token_id in ours.eos_ids


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": False},
        {"bos_token": {"__type": "AddedToken", "content": "<|bos|>", "lstrip": False}},
    ],
)
def test_special_tokens_are_added_as_in_transformers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    for before in (None, "<|bos|>"):
        path = write_model(tmp_path / f"m{before is None}", settings, before=before)
        ours, theirs = TextModel.load(path), transformers_tokenizer(path)
        for special in (True, False):
            expected = theirs("a stream<|end|> of", add_special_tokens=special)["input_ids"]
            found = ours.encode("a stream<|end|> of", add_special_tokens=special)
            assert found == expected
            assert (found[0] == theirs.bos_token_id) == (special and before is not None)


def test_tokens_that_only_the_configuration_has_are_added(tmp_path: Path) -> None:
    listed = {
        "400": {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False,
                "single_word": False, "normalized": False},
    }  # fmt: skip
    path = write_model(tmp_path / "m", {"added_tokens_decoder": listed})
    ours, theirs = TextModel.load(path), transformers_tokenizer(path)
    assert ours.encode("a<extra>b", add_special_tokens=False) == theirs("a<extra>b")["input_ids"]
    assert ours.token_bytes(ours.encode("<extra>", add_special_tokens=False)[0]) == b"<extra>"


def test_a_final_message_is_continued_as_in_transformers(tmp_path: Path) -> None:
    for name in ("plain", "blocks"):
        path = write_model(tmp_path / name.replace(" ", ""), {"chat_template": TEMPLATES[name]})
        ours, theirs = TextModel.load(path).chat_template, transformers_tokenizer(path)
        assert ours is not None
        chat = [USER, {"role": "assistant", "content": "Two, since"}]
        text = ours.render(chat, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith("Two, since")
        assert text == theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)


# --------------------------------------------------------------------------------- where from


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    def rendered(path: Path, override: Path | None = None) -> str | None:
        template = TextModel.load(path, override).chat_template
        return None if template is None else template.render([USER])

    assert rendered(write_model(tmp_path / "none")) is None
    assert rendered(write_model(tmp_path / "string", {"chat_template": "a"})) == "a"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    listed = write_model(tmp_path / "list", {"chat_template": several})
    assert rendered(listed) == "d"
    template = TextModel.load(listed).chat_template
    assert template is not None and template.render([USER], tools=[{"name": "f"}]) == "t"
    (listed / "chat_template.jinja").write_text("file")
    assert rendered(listed) == "file"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert rendered(listed, own) == "own"
    with pytest.raises(ModelError, match="no such chat template"):
        rendered(listed, tmp_path / "missing.jinja")
    only = write_model(tmp_path / "only", {"chat_template": several[:1]})
    with pytest.raises(ModelError, match="none named 'default'"):
        TextModel.load(only)
    bad = write_model(tmp_path / "bad", {"chat_template": "{% for %}"})
    with pytest.raises(ModelError, match="does not compile"):
        TextModel.load(bad)


def test_end_tokens_come_from_all_that_name_them(tmp_path: Path) -> None:
    end = byte_level_tokenizer().token_to_id("<|end|>")
    path = write_model(
        tmp_path / "a", generation_config={"eos_token_id": [7, 9]}, config={"eos_token_id": 5}
    )
    assert TextModel.load(path).eos_ids == (7, 9, end)
    path = write_model(tmp_path / "b", config={"text_config": {"eos_token_id": 5}})
    assert TextModel.load(path).eos_ids == (5, end)
    path = write_model(tmp_path / "c", {"eos_token": None}, config={"vocab_size": 512})
    text = TextModel.load(path)
    assert (text.eos_ids, text.vocab_size) == ((), 512)


def test_the_models_recommendations_are_the_defaults(tmp_path: Path) -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None}
    path = write_model(tmp_path / "a", generation_config=recommended)
    assert TextModel.load(path).defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert TextModel.load(write_model(tmp_path / "b")).defaults.temperature == 1.0


@pytest.mark.parametrize(
    "recommended",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": True},
        {"top_p": 7},
        {"top_p": "0.9"},
        {"top_k": 2.5},
        {"top_k": 10**30},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
    ],
)
def test_a_recommendation_that_no_request_could_have_is_refused(
    tmp_path: Path, recommended: dict[str, Any]
) -> None:
    path = write_model(tmp_path / "a", generation_config=recommended)
    with pytest.raises(ModelError, match=f"generation_config.json: {next(iter(recommended))} is"):
        TextModel.load(path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        TextModel.load(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="object"):
        TextModel.load(path)
    (path / "config.json").unlink()
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        TextModel.load(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no such file"):
        TextModel.load(path)


# ------------------------------------------------------------------------------------ refusals


def test_a_templates_objection_is_the_requests_error() -> None:
    objections = {
        "{{ raise_exception('roles must alternate') }}": "roles must alternate",
        "{{ messages[0].content + 1 }}": "can only concatenate",
        "{{ messages[5].role }}": "no element 5",
        "{{ messages.append(1) }}": "unsafe",
        "{{ ''.__class__.__mro__ }}": "unsafe",
        "{% set ns = namespace(__init__=1) %}": "__init__",
        "{{ 3 / 0 }}": "zero",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    }
    for source, words in objections.items():
        with pytest.raises(InvalidRequest, match=words) as caught:
            ChatTemplate({"default": source}, {}).render([USER])
        assert caught.value.param == "messages"


def test_a_null_in_a_message_is_as_if_it_were_not_there() -> None:
    template = ChatTemplate({"default": "{{ 'content' in messages[0] }}"}, {})
    assert template.render([{"role": "user", "content": None}]) == "False"


def test_token_bytes_tell_spaces_and_parts_of_characters() -> None:
    text = TextModel(metaspace_tokenizer())
    ids = [text.tokenizer.token_to_id(name) for name in ("▁the", "<0xE4>", "</s>")]
    assert [text.token_bytes(token) for token in ids] == [b" the", b"\xe4", b"</s>"]
    bytes_of = TextModel(byte_level_tokenizer())
    tokens = bytes_of.encode(" 🎉", add_special_tokens=False)
    assert b"".join(bytes_of.token_bytes(token) for token in tokens) == " 🎉".encode()
