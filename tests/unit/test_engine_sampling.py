"""Sampling: transformers' filters; draws that are what the numbers say, whatever the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flexslurm.engine import drawing
from flexslurm.engine.drawing import filtered
from flexslurm.engine.philox import philox, uniform
from flexslurm.engine.sampling import _adjusted, sample
from flexslurm.messages import ChunkSampling, SamplingParams

VOCAB = 97


def logits_of(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn((rows, VOCAB), generator=stream, dtype=torch.float64) * spread


def one(position: int = 0, **params: object) -> ChunkSampling:
    extra = {key: params.pop(key) for key in ("suppress", "prompt", "output") if key in params}
    return ChunkSampling(
        params=SamplingParams(**params), position=position, **extra  # type: ignore[arg-type]
    )  # fmt: skip


# ------------------------------------------------------------------- random numbers


@given(
    st.tuples(*[st.integers(0, 2**64 - 1)] * 2), st.tuples(*[st.integers(0, 2**64 - 1)] * 4)
)  # fmt: skip
def test_philox_is_the_published_one(key: tuple, counter: tuple) -> None:
    """numpy's generator of the same name is the oracle; it counts up before it draws."""
    bits = np.random.Philox(counter=np.array(counter, np.uint64), key=np.array(key, np.uint64))
    whole = sum(word << (64 * i) for i, word in enumerate(counter)) + 1
    ahead = tuple((whole >> (64 * i)) & (2**64 - 1) for i in range(4))
    assert philox(key, ahead) == tuple(int(word) for word in bits.random_raw(4))


def test_numbers_are_even_over_positions_and_over_seeds() -> None:
    for numbers in (
        [uniform(7, position) for position in range(4000)],
        [uniform(seed, 3) for seed in range(4000)],
    ):
        assert all(0 <= number < 1 for number in numbers)
        assert kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef([[uniform(s, p) for p in range(3000)] for s in (0, 1)])[0, 1]) < 0.06


def test_a_negative_or_large_seed_is_a_seed_like_any_other() -> None:
    assert len({uniform(seed, 0) for seed in (-1, 2**64 - 1, 2**63, 2**70, 0)}) == 5


# ------------------------------------------------------------------- filters


def hf_scores(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain(torch.zeros((len(logits), 1), dtype=torch.long), logits.clone())


def probabilities(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """What our filters leave, as a whole distribution."""
    whole = torch.zeros(logits.shape, dtype=torch.float64)
    for kept, rows in filtered(logits, params):
        assert (kept.tokens[:, 1:] > kept.tokens[:, :-1]).all()
        part = torch.zeros((len(rows), logits.shape[1]), dtype=torch.float64)
        whole[rows] = part.scatter(1, kept.tokens, kept.weights)
    return whole / whole.sum(-1, keepdim=True)


@pytest.mark.parametrize("candidates", [(8, 24), ()], ids=["few-candidates", "whole-rows"])
@given(
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 7, 8, 40, VOCAB, 500]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 50),
)
def test_filters_keep_what_transformers_keeps(
    candidates: tuple[int, ...],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(3, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_CANDIDATES", candidates)
        ours = probabilities(logits, [params] * 3)
    theirs = hf_scores(logits, params).softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("candidates", [(8,), ()])
@pytest.mark.parametrize("filters", [{"top_k": 4}, {"min_p": 1e-30}, {"top_k": 500}])
def test_a_token_lighter_than_rounding_stays_where_top_p_is_off(
    candidates: tuple[int, ...], filters: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weight vanishes in the sum of those before it: top-p at 1.0 must not look at that."""
    monkeypatch.setattr(drawing, "_CANDIDATES", candidates)
    logits = torch.tensor([[0.0, -1.0, -45.0, -50.0, *[-200.0] * 20]], dtype=torch.float64)
    params = SamplingParams(temperature=1.0, **filters)
    ours, theirs = probabilities(logits, [params]), hf_scores(logits, params).softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    assert (ours[0, :4] > 0).all()
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=0.0)


def test_rows_are_filtered_each_by_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_CANDIDATES", (8,))
    settings = [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_k=30, top_p=0.4),
        SamplingParams(temperature=2.0, min_p=0.3),
        SamplingParams(temperature=1.5, top_p=0.8, min_p=0.1),
        SamplingParams(temperature=9.0, top_p=0.99),
    ]
    logits = logits_of(len(settings))
    together = probabilities(logits, settings)
    for row, params in enumerate(settings):
        assert torch.equal(together[row], probabilities(logits[row : row + 1], [params])[0])


@pytest.mark.parametrize("candidates", [(2,), ()])
def test_ties_at_the_border_stay_whatever_the_order(
    candidates: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_CANDIDATES", candidates)
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    wanted = [False, True, True, True, True, False]
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=math.exp(-1.0) - 1e-9),
    ):
        assert (probabilities(logits, [params])[0] > 0).tolist() == wanted


@given(
    penalty=st.sampled_from([0.5, 1.3, 2.0]),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
)
def test_repetition_is_penalised_as_in_transformers(
    penalty: float, prompt: list[int], output: list[int]
) -> None:
    logits = logits_of(1)
    asked = one(repetition_penalty=penalty, prompt=tuple(prompt), output=tuple(output))
    ids = torch.tensor([prompt + output], dtype=torch.long)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    torch.testing.assert_close(_adjusted(logits, [asked]), theirs)


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = logits_of(1)
    asked = one(
        presence_penalty=0.5, frequency_penalty=0.25, prompt=(4, 5), output=(7, 8, 7, 7)
    )  # fmt: skip
    changed = _adjusted(logits, [asked])[0] - logits[0]
    wanted = torch.zeros(VOCAB, dtype=torch.float64)
    wanted[7], wanted[8] = -(0.5 + 3 * 0.25), -(0.5 + 0.25)
    torch.testing.assert_close(changed, wanted)


def test_bias_and_suppression_steer_greedy_answers() -> None:
    logits = logits_of(4)
    best = int(logits[0].argmax())
    logits[:] = logits[0]
    second = int(logits[0].topk(2).indices[1])
    found = sample(
        logits,
        [
            one(),
            one(logit_bias={17: 1000.0, VOCAB + 5: 5.0, -3: 1.0}),
            one(suppress=(best, VOCAB + 9)),
            one(logit_bias={17: 1000.0}, suppress=(17, best)),
        ],
    )
    assert [token for token, _ in found] == [best, 17, second, second]


def test_the_logits_given_are_not_changed() -> None:
    logits = logits_of(2)
    before = logits.clone()
    sample(
        logits,
        [
            one(repetition_penalty=2.0, output=(1,), temperature=1.0, logprobs=3),
            one(suppress=(1, 2), logit_bias={3: 2.0}),
        ],
    )
    assert torch.equal(logits, before)


# ------------------------------------------------------------------- draws


def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits = logits_of(1, seed=4, spread=1.0)
    params = {"temperature": 0.8, "top_p": 0.9, "seed": 12}
    count = 20_000
    weights = probabilities(logits, [SamplingParams(**params)])[0].numpy()  # type: ignore[arg-type]
    drawn = [
        token
        for first in range(0, count, 500)
        for token, _ in sample(
            logits.expand(500, VOCAB), [one(position=first + i, **params) for i in range(500)]
        )
    ]
    counts = np.bincount(drawn, minlength=VOCAB)
    kept = weights > 0
    assert counts[~kept].sum() == 0
    assert kept.sum() > 10
    assert chisquare(counts[kept], weights[kept] * count).pvalue > 1e-3


def test_what_cannot_round_up_past_the_end_does_not() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64)
    assert drawing._invert(weights, [0.0]) == [1]
    assert drawing._invert(weights, [1.0 - 2.0**-53]) == [3]
    assert drawing._invert(weights, [1.0]) == [3]


def test_a_draw_inverts_the_distribution_at_the_number() -> None:
    logits = logits_of(1, spread=1.0)
    ladder = np.cumsum(logits[0].softmax(-1).numpy())
    for position in range(50):
        wanted = int(np.searchsorted(ladder, uniform(9, position), side="right"))
        assert sample(logits, [one(position, temperature=1.0, seed=9)])[0][0] == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_batch_makes_no_difference(dtype: torch.dtype) -> None:
    logits = logits_of(40, spread=2.0).to(dtype)
    asked = [
        one(
            position=row * 3,
            seed=row % 5,
            temperature=(0.0, 0.7, 1.0, 1.4)[row % 4],
            top_k=(0, 10)[row % 2],
            top_p=(1.0, 0.8, 0.95)[row % 3],
            min_p=(0.0, 0.05)[row // 20],
            repetition_penalty=(1.0, 1.2)[row % 2],
            presence_penalty=(0.0, 0.5)[row % 3 // 2],
            prompt=(1, 2, 3),
            output=tuple(range(row % 7)),
            logprobs=row % 4 - 1,
        )
        for row in range(40)
    ]
    together = sample(logits, asked)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [asked[row] for row in order])
    assert [together[row] for row in order] == shuffled
    for row in range(40):
        assert sample(logits[row : row + 1], [asked[row]])[0] == together[row]


def test_slices_of_a_large_batch_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(9)
    asked = [one(row, temperature=1.0, top_p=0.9) for row in range(9)]
    whole = sample(logits, asked)
    monkeypatch.setattr(drawing, "_SLICE_ELEMENTS", 2 * VOCAB)
    assert sample(logits, asked) == whole


def test_extreme_settings_are_greedy() -> None:
    logits = logits_of(6)
    best = logits.argmax(-1).tolist()
    asked = [
        one(),
        one(temperature=1e-8),
        one(temperature=5.0, top_k=1),
        one(temperature=5.0, top_p=1e-12),
        one(temperature=5.0, min_p=1.0),
        one(temperature=1e-300),
    ]
    assert [token for token, _ in sample(logits, asked)] == best


def test_a_suppressed_token_is_never_drawn() -> None:
    logits = torch.zeros((1, VOCAB))
    for position in range(200):
        asked = one(position, temperature=1.0, suppress=tuple(range(1, VOCAB)))
        assert sample(logits, [asked])[0][0] == 0


def test_nothing_to_sample_gives_nothing() -> None:
    assert sample(torch.empty((0, VOCAB)), []) == []


# ------------------------------------------------------------------- log probabilities


def test_log_probabilities_are_the_models_own() -> None:
    """Whatever is done to choose the token, what is reported is the unchanged distribution."""
    logits = logits_of(1)
    own = logits[0].log_softmax(-1)
    for asked in (
        one(logprobs=4),
        one(logprobs=4, temperature=0.3, top_k=2, seed=5),
        one(logprobs=4, logit_bias={11: 1000.0}, repetition_penalty=1.5, output=(11,)),
    ):
        token, found = sample(logits, [asked])[0]
        assert found is not None
        assert found.logprob == pytest.approx(float(own[token]))
        values, tokens = own.topk(4)
        assert [t for t, _ in found.top] == tokens.tolist()
        assert [v for _, v in found.top] == pytest.approx(values.tolist())


def test_log_probabilities_only_where_asked() -> None:
    logits = logits_of(3)
    none, chosen, many = sample(logits, [one(), one(logprobs=0), one(logprobs=1000)])
    assert none[1] is None
    assert chosen[1] is not None
    assert chosen[1].top == ()
    assert many[1] is not None
    assert len(many[1].top) == VOCAB
