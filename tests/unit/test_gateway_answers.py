"""Details of the answers' bytes that clients stumble over."""

from __future__ import annotations

import json

from gateway_fakes import small_text

from flexslurm.gateway.answers import AnswerSettings, ChatForm, TextForm
from flexslurm.gateway.card import ModelCard
from flexslurm.gateway.choice import Choice, EndRules
from flexslurm.gateway.port import ServedLimits
from flexslurm.gateway.responses import sse
from flexslurm.gateway.schemas import ChatBody, ChatMessage, CompletionBody
from flexslurm.gateway.translate import GenerationPlan, plan_request, render_chat
from flexslurm.messages import FinishReason, TokenEvent, TokenLogprobs


def plan_of(prompts: list[tuple[int, ...]], n: int = 1) -> GenerationPlan:
    return plan_request(
        CompletionBody(prompt="unused", n=n),
        prompts,
        request_id="r",
        text=small_text(),
        limits=ServedLimits(None, 100),
        random_seed=lambda: 5,
    )


def settings_of(plan: GenerationPlan, logprobs: int) -> AnswerSettings:
    return AnswerSettings(
        plan=plan,
        model=ModelCard("m", "", 100).name,
        created=1,
        text=small_text(),
        logprobs=logprobs,
    )


def ended(index: int, text: str, logprobs: TokenLogprobs) -> Choice:
    choice = Choice(index, small_text().detokenizer(skip_special=True), EndRules())
    tokens = small_text().encode(text, add_special_tokens=False)
    for position, token in enumerate(tokens):
        finish = FinishReason.LENGTH if position == len(tokens) - 1 else None
        choice.push(
            TokenEvent(
                seq_id=f"r/{index}",
                token=token,
                position=position,
                logprobs=logprobs,
                finish=finish,
            )
        )
    return choice


def test_line_separators_that_only_python_knows_are_escaped() -> None:
    data = sse({"text": "a\u2028b\u2029c\x85d\ne"})
    assert data.decode().splitlines() == [
        'data: {"text":"a\\u2028b\\u2029c\\u0085d\\ne"}',
        "",
    ]
    assert json.loads(data[6:])["text"] == "a\u2028b\u2029c\x85d\ne"


def test_an_impossible_token_has_a_finite_log_probability() -> None:
    never = TokenLogprobs(float("-inf"), ((5, float("-inf")),))
    plan = plan_of([(1,)])
    text = json.loads(TextForm(settings_of(plan, 1)).whole([ended(0, "a", never)]))
    assert text["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    chat = json.loads(ChatForm(settings_of(plan, 1)).whole([ended(0, "a", never)]))
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_offsets_count_from_the_echoed_prompt_of_the_choice() -> None:
    plan = plan_of([(1,), (2,)], n=2)
    form = TextForm(settings_of(plan, 0), ["ab", "abcd"])
    choices = [ended(index, "x", TokenLogprobs(-1.0)) for index in range(4)]
    found = json.loads(form.whole(choices))["choices"]
    assert [choice["text"] for choice in found] == ["abx", "abx", "abcdx", "abcdx"]
    assert [choice["logprobs"]["text_offset"] for choice in found] == [[2], [2], [4], [4]]


def test_a_prompt_is_counted_once_however_many_choices_it_has() -> None:
    plan = plan_of([(1, 2, 3), (4, 5)], n=3)
    choices = [ended(index, "x", TokenLogprobs(-1.0)) for index in range(6)]
    usage = json.loads(TextForm(settings_of(plan, -1)).whole(choices))["usage"]
    assert usage == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


def test_developers_speak_as_the_system_to_templates_that_do_not_know_them() -> None:
    body = ChatBody(
        messages=[
            ChatMessage(role="developer", content="be brief"),
            ChatMessage(
                role="user",
                content=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            ),
        ]
    )
    text = render_chat(
        small_text(), body.messages, add_generation_prompt=False, continue_final_message=False
    )
    assert text == "<|start|>system\nbe brief<|end|>\n<|start|>user\none\ntwo<|end|>\n"
