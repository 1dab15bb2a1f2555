"""Slots: what is kept, copied, evicted and refilled, and that none of it changes a log-prob."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import VOCAB, tiny_model

from stateset_agents.backends.local.batcher import MIN_SHARED_TOKENS, Batcher
from stateset_agents.backends.local.slot_table import GenerationRequest, new_request
from stateset_agents.backends.models.fused import FusedModel
from stateset_agents.backends.models.slots import SlotModel
from stateset_agents.backends.models.unbatched import UnbatchedModel
from stateset_agents.types.errors import BackendError
from stateset_agents.types.messages import SamplingParams, VersionSpan

CONTEXT = 256


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


def batcher(max_cached_tokens: int = 100_000, seed: int = 0) -> Batcher:
    return Batcher(SlotModel(tiny_model("llama", seed).eval()), max_cached_tokens=max_cached_tokens)


def turn(member: int, prompt: list[int], new: int = 4, **options: float) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=new, stream=100 * member + len(prompt), **options)  # type: ignore[arg-type]  # knobs by name
    return new_request((0, 0, member), prompt, params, frozenset(), CONTEXT)


def prompt(member: int, length: int = 6) -> list[int]:
    dice = torch.Generator().manual_seed(member)
    return torch.randint(VOCAB, (length,), generator=dice).tolist()


def run(work: Batcher, *turns: GenerationRequest) -> None:
    """Admit what fits, step, and go on until all have ended."""
    waiting = list(turns)
    live: list[GenerationRequest] = []
    for _ in range(1000):
        admitted = [each for each in waiting if work.admit(each)]
        waiting = [each for each in waiting if each not in admitted]
        live += admitted
        if not live:
            break
        work.step(live)
        live = [each for each in live if each.finish_reason is None]
    assert not waiting
    for each in turns:
        assert_exact(work, each)


def assert_exact(work: Batcher, each: GenerationRequest, atol: float = 2e-5) -> None:
    ids = torch.tensor(each.ids)
    plain = work.model.full_logits(ids)[len(each.prompt) - 1 : -1].log_softmax(-1)
    expected = plain.gather(-1, ids[len(each.prompt) :, None])[:, 0]
    assert torch.allclose(torch.tensor(each.logprobs), expected, atol=atol)


def test_a_second_turn_prefills_only_what_is_new() -> None:
    work = batcher()
    first = turn(0, prompt(0), new=5)
    run(work, first)
    assert work.stats.prefilled_tokens == 6
    run(work, turn(0, [*first.ids, 1, 2, 3]))
    assert (work.stats.prefilled_tokens, work.stats.carried_tokens) == (9, 1)


def test_a_rewritten_history_keeps_the_longest_common_prefix() -> None:
    work = batcher()
    first = turn(0, prompt(0, 10), new=5)
    run(work, first)
    rewritten = [*first.ids[:7], (first.ids[7] + 1) % VOCAB, 4, 5]
    run(work, turn(0, rewritten))
    assert (work.stats.prefilled_tokens, work.stats.carried_tokens) == (13, 0)


def test_asking_again_for_the_same_prompt_forwards_its_last_token_only() -> None:
    work = batcher()
    run(work, turn(0, prompt(0)))
    again = turn(0, prompt(0))
    run(work, again)
    assert work.stats.prefilled_tokens == 7


def test_a_turn_says_the_same_alone_and_among_others() -> None:
    alone = turn(3, prompt(3), new=20)
    run(batcher(), alone)
    among = turn(3, prompt(3), new=20)
    other_turns = [
        turn(member, prompt(member, 3 + 7 * member), new=1 + 5 * member) for member in (0, 1, 2, 4, 5)
    ]
    run(batcher(), among, *other_turns)
    assert among.ids == alone.ids
    assert torch.allclose(torch.tensor(among.logprobs), torch.tensor(alone.logprobs), atol=2e-5)


def test_a_groups_prompt_is_forwarded_once() -> None:
    work = batcher()
    group = [turn(member, prompt(0, 40)) for member in range(8)]
    run(work, *group)
    assert work.stats.prefilled_tokens == 40 + 7 * 1  # a sibling forwards the last token, to have its logits
    assert work.stats.shared_tokens == 7 * 39
    assert work.stats.prefills == 1  # the siblings' one token goes with a decode step


def test_a_common_system_prompt_is_forwarded_once_for_all_groups() -> None:
    work = batcher()
    system = prompt(0, 30)
    groups = [[*system, *prompt(1 + group, 20)] for group in range(3)]
    run(work, *(turn(8 * group + member, ids) for group, ids in enumerate(groups) for member in range(4)))
    alone = 30 + 20  # the first of all
    other_turns = 2 * 20  # the first of each other group: what comes after the system prompt
    siblings = 3 * 3 * 1
    assert work.stats.prefilled_tokens == alone + other_turns + siblings
    assert work.stats.shared_tokens == 2 * 30 + 9 * 49
    before = work.stats.prefilled_tokens
    run(work, turn(99, [*system, *prompt(9, 20)]))  # a latecomer finds it in the cache
    assert work.stats.prefilled_tokens - before == 20


def test_short_beginnings_are_forwarded_again() -> None:
    work = batcher()
    run(work, *(turn(member, [*prompt(0, MIN_SHARED_TOKENS - 1), 10 + member, 3]) for member in range(3)))
    assert (work.stats.prefilled_tokens, work.stats.shared_tokens) == (3 * (MIN_SHARED_TOKENS + 1), 0)
    work = batcher()
    run(work, *(turn(member, [*prompt(0, MIN_SHARED_TOKENS), 10 + member, 3]) for member in range(3)))
    assert (work.stats.prefilled_tokens, work.stats.shared_tokens) == (
        MIN_SHARED_TOKENS + 2 + 2 * 2,
        2 * MIN_SHARED_TOKENS,
    )


def test_a_new_conversation_takes_over_what_another_said() -> None:
    work = batcher()
    first = turn(0, prompt(0, 20), new=10)
    run(work, first)
    second = turn(0, [*first.ids, *prompt(1, 20)], new=10)
    run(work, second)
    before = work.stats.prefilled_tokens
    run(work, turn(7, [*first.ids, 1, 2, 3]))  # a branch after the first turn
    # 29 of the first turn's 30 tokens are cached in it, and the 30th since the second turn.
    assert work.stats.prefilled_tokens - before == 3
    before = work.stats.prefilled_tokens
    run(work, turn(8, [*second.ids, 1, 2, 3]))  # the second turn's last token never was forwarded
    assert work.stats.prefilled_tokens - before == 4


def test_after_new_weights_a_groups_live_turns_are_refilled_together() -> None:
    work = batcher()
    group = [turn(member, prompt(0, 40), new=6) for member in range(4)]
    for each in group:
        work.admit(each)
    for _ in range(3):
        work.step(group)
    work.set_version(1)
    before = work.stats.prefilled_tokens
    while live := [each for each in group if each.finish_reason is None]:
        work.step(live)
    # Each had sampled 3 tokens. What begins alike is forwarded once; the newest token of each is no prompt.
    different = {tuple(each.ids[:end]) for each in group for end in range(1, 43 + 1)}
    assert work.stats.prefilled_tokens - before == len(different) - 4
    for each in group:
        assert_exact(work, each)


def test_the_longest_idle_conversation_is_evicted_and_refilled_when_it_returns() -> None:
    work = batcher(max_cached_tokens=3 * 32)
    firsts = [turn(member, prompt(member)) for member in range(3)]
    for each in firsts:
        run(work, each)
    run(work, turn(0, [*firsts[0].ids, 9]))  # 0 is no longer the longest idle; 1 is
    run(work, turn(3, prompt(3)))
    assert work.stats.evictions == 1
    before = work.stats.prefilled_tokens
    run(work, turn(1, [*firsts[1].ids, 9]))
    assert work.stats.prefilled_tokens - before == len(firsts[1].ids) + 1  # all of it again
    assert work.stats.evictions == 2


@pytest.mark.parametrize("bound", [96, 160, 512])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.first(1)
def test_the_bound_holds_whatever_comes_and_evicted_conversations_go_on_exactly(
    bound: int, seed: int
) -> None:
    dice, work = random.Random(seed), batcher(max_cached_tokens=bound)
    history = {member: prompt(member, dice.randint(1, 20)) for member in range(10)}
    live: dict[int, GenerationRequest] = {}
    num_ended = 0
    for _ in range(200):
        member = dice.randrange(10)
        if member not in live:
            if len(history[member]) > 50:
                history[member] = prompt(member, dice.randint(1, 30))
            each = turn(member, history[member], new=dice.randint(1, 12))
            if work.admit(each):
                live[member] = each
        if live:
            for each in work.step(list(live.values())):  # those evicted in between are forwarded again
                assert_exact(work, each, atol=1e-5)
                del live[each.key[2]]
                history[each.key[2]] = [*each.ids, *prompt(num_ended, 5)]
                num_ended += 1
        assert work.model.num_slots * work.model.num_columns <= bound
    assert num_ended > 20
    assert work.stats.evictions > 0


def test_who_is_evicted_does_not_depend_on_what_the_store_had_grown_to() -> None:
    def play(work: Batcher) -> tuple[int, list[list[float]]]:
        before, turns = work.stats.evictions, []
        for member in (0, 1, 2, 3, 0, 4, 1):
            turns.append(turn(member, prompt(member, 20 + 12 * member)))
            run(work, turns[-1])
        return work.stats.evictions - before, [each.logprobs for each in turns]

    fresh, grown = batcher(max_cached_tokens=3 * 96), batcher(max_cached_tokens=3 * 96)
    run(grown, turn(9, prompt(9, 200), new=40))  # one wide conversation, long gone
    run(grown, *(turn(10 + member, prompt(member)) for member in range(2)))
    for member in range(9, 12):
        grown.release((0, 0, member))
    played = play(fresh)
    assert played[0] > 0
    assert play(grown) == played


def test_live_conversations_are_never_evicted_and_newcomers_wait() -> None:
    work = batcher(max_cached_tokens=64)
    first, second, third = (turn(member, prompt(member), new=3 + member) for member in range(3))
    assert work.admit(first)
    assert work.admit(second)
    assert not work.admit(third)
    run(batcher(max_cached_tokens=64), *(turn(member, prompt(member), new=3 + member) for member in range(9)))


def test_a_conversation_larger_than_the_bound_is_refused_with_the_cure() -> None:
    with pytest.raises(BackendError, match="may need 64 cached tokens and max_cached_tokens is 32; raise it"):
        batcher(max_cached_tokens=32).admit(turn(0, prompt(0, 40)))


def test_a_fork_shares_what_was_cached() -> None:
    work = batcher()
    first = turn(0, prompt(0, 12))
    run(work, first)
    before = work.stats.prefilled_tokens
    for member in (1, 2):
        work.fork((0, 0, 0), (0, 0, member))
    run(work, *(turn(member, [*first.ids, member]) for member in (0, 1, 2)))
    assert work.stats.prefilled_tokens - before == 3 * 1
    assert work.stats.carried_tokens == 3


def test_forking_into_an_existing_conversation_replaces_it_and_unknown_ones_are_ignored() -> None:
    work = batcher()
    first, second = turn(0, prompt(0)), turn(1, prompt(1))
    run(work, first, second)
    work.fork((0, 0, 0), (0, 0, 1))
    work.fork((0, 0, 7), (0, 0, 8))
    work.release((0, 0, 9))
    run(work, turn(1, [*first.ids, 5]))
    assert work.stats.carried_tokens == 1


def test_a_fork_without_room_is_only_slower() -> None:
    work = batcher(max_cached_tokens=32)
    first = turn(0, prompt(0))
    run(work, first)
    work.fork((0, 0, 0), (0, 0, 1))
    run(work, turn(1, [*first.ids, 5]))
    assert work.stats.carried_tokens == 0


def test_scattered_live_rows_move_together() -> None:
    work = batcher()
    firsts = [turn(member, prompt(member)) for member in range(40)]
    run(work, *firsts)
    steps, rows = work.stats.decode_steps, work.stats.decode_rows
    seconds = [turn(member, [*firsts[member].ids, 3], new=6) for member in (2, 20, 39)]
    run(work, *seconds)
    assert (work.stats.decode_rows - rows) / (work.stats.decode_steps - steps) == 8
    run(work, *(turn(each.key[2], [*each.ids, 1, 2]) for each in (*firsts[3:20], *seconds)))
    assert work.stats.prefilled_tokens == 40 * 6 + 3 * 1 + 20 * 2  # nobody lost a cache by moving


def test_new_weights_refill_live_turns_and_mark_their_tokens() -> None:
    work = batcher()
    each = turn(0, prompt(0), new=5)
    work.admit(each)
    work.step([each])
    work.step([each])
    new_model = tiny_model("llama", seed=1)
    for parameter, new in zip(work.model.model.parameters(), new_model.parameters(), strict=True):
        parameter.copy_(new)
    work.set_version(7)
    for _ in range(3):
        work.step([each])
    assert each.finish_reason == "length"
    assert each.version_spans() == (VersionSpan(0, 0, 2), VersionSpan(7, 2, 5))
    ids = torch.tensor(each.ids)
    plain = work.model.full_logits(ids)[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    assert torch.allclose(torch.tensor(each.logprobs[2:]), plain[len(each.prompt) + 1 :], atol=2e-5)


def test_a_stop_token_ends_a_turn_and_is_part_of_it() -> None:
    free = turn(0, prompt(0), new=30)
    run(batcher(), free)
    sampled = free.ids[len(free.prompt) :]
    stop = sampled[4]
    index = sampled.index(stop)
    stopped = new_request((0, 0, 0), prompt(0), free.params, frozenset({stop}), CONTEXT)
    run(batcher(), stopped)
    assert stopped.finish_reason == "stop"
    assert stopped.ids[len(stopped.prompt) :] == sampled[: index + 1]


def test_a_full_context_cuts_the_turn() -> None:
    each = turn(0, prompt(0, CONTEXT - 3), new=50)
    run(batcher(), each)
    assert (each.finish_reason, len(each.ids)) == ("length", CONTEXT)


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], SamplingParams(), "prompt is empty"),
        ([1] * CONTEXT, SamplingParams(), "256 tokens and the context holds 256"),
        ([1], SamplingParams(max_new_tokens=0), "max_new_tokens"),
        ([1], SamplingParams(temperature=-1.0), "temperature"),
        ([1], SamplingParams(top_p=0.0), "top_p"),
    ],
)
def test_impossible_turns_are_refused(ids: list[int], params: SamplingParams, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        new_request((0, 0, 0), ids, params, frozenset(), CONTEXT)


def test_truncated_and_greedy_turns_share_a_batch_with_plain_ones() -> None:
    greedy = [turn(0, prompt(0), new=8, temperature=0.0) for _ in range(2)]
    run(batcher(), greedy[0])
    run(batcher(), greedy[1], turn(1, prompt(1), new=8))
    assert greedy[0].ids == greedy[1].ids
    narrow, work = turn(2, prompt(2), new=8, top_k=1), batcher()
    work.admit(narrow)
    while narrow.finish_reason is None:
        work.step([narrow])
    assert narrow.logprobs == pytest.approx([0.0] * 8, abs=1e-6)  # of the distribution sampled from


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.first(1)
def test_any_mix_of_turns_forks_releases_and_cancelled_turns_stays_exact(seed: int) -> None:
    dice = random.Random(seed)
    work = batcher(max_cached_tokens=dice.choice([6 * 64, 16 * 96, 100_000]))
    history = {member: prompt(member) for member in range(14)}
    live: list[GenerationRequest] = []
    for _ in range(250):
        busy = {each.key[2] for each in live}
        free = [member for member in history if member not in busy]
        chance = dice.random()
        if free and chance < 0.3:
            member = dice.choice(free)
            if len(history[member]) > 40:
                history[member] = prompt(member)
            each = turn(member, [*history[member], dice.randrange(VOCAB)], new=dice.randint(1, 9))
            live += [each] if work.admit(each) else []
        elif len(free) > 1 and chance < 0.36:
            source, into = dice.sample(free, 2)
            work.fork((0, 0, source), (0, 0, into))
            history[into] = list(history[source])
        elif free and chance < 0.4:
            work.release((0, 0, dice.choice(free)))
        elif live and chance < 0.43:
            work.cancel(live.pop(dice.randrange(len(live))))
        elif live:
            for each in work.step(dice.sample(live, dice.randint(1, len(live)))):
                live.remove(each)
                history[each.key[2]] = each.ids
                assert_exact(work, each)
    assert work.stats.sampled_tokens > 100


@pytest.mark.parametrize("engine", [SlotModel, FusedModel, UnbatchedModel])
def test_a_rest_frees_the_cache_once_nobody_holds_any_of_it_and_the_next_turn_says_the_same(
    engine: type,
) -> None:
    work = Batcher(engine(tiny_model("llama").eval()), max_cached_tokens=100_000)
    run(work, *(turn(member, prompt(member)) for member in range(3)))
    work.release((0, 0, 0))
    work.sleep()  # two conversations are idle: theirs stays
    assert work.model.num_slots > 0
    work.release((0, 0, 1))
    work.release((0, 0, 2))
    work.sleep()
    work.sleep()
    assert work.model.num_slots == work.model.num_columns == 0
    again = turn(1, prompt(1))
    run(work, again, turn(9, prompt(9, 70)))  # longer than any before
    fresh = Batcher(engine(tiny_model("llama").eval()), max_cached_tokens=100_000)
    alone = turn(1, prompt(1))
    run(fresh, alone)
    assert again.sampled == alone.sampled


def stranger(serial: int, prompt: list[int], new: int = 4) -> GenerationRequest:
    """A turn without a session, as a server's clients ask for."""
    params = SamplingParams(max_new_tokens=new, stream=serial)
    return new_request((1, serial, 0), prompt, params, frozenset(), 2048)


def long_work(engine: type = FusedModel) -> Batcher:
    model = tiny_model("llama").eval()
    model.config.max_position_embeddings = 2048
    return Batcher(engine(model), max_cached_tokens=100_000)


@pytest.mark.parametrize("engine", [SlotModel, FusedModel, UnbatchedModel])
def test_strangers_long_prompts_are_read_in_pieces_and_say_the_same(engine: type) -> None:
    work = long_work(engine)
    shared = prompt(3, 700)  # two of them begin alike
    several = [prompt(1, 600), shared, [*shared, 5, 6], prompt(2, 20), prompt(4, 300)]
    run(work, *(stranger(serial, ids, new=6) for serial, ids in enumerate(several)))
    assert work.stats.prefills > 10
    assert work.stats.shared_tokens >= (0 if engine is UnbatchedModel else 600)


def test_a_short_prompt_is_through_at_once_beside_many_long_ones() -> None:
    work = long_work()
    long = [stranger(serial, prompt(serial, 900), new=2) for serial in range(8)]
    for each in long:
        assert work.admit(each)
    work.step(long)
    short = stranger(99, prompt(99, 20), new=3)
    assert work.admit(short)
    steps = 0
    while short.finish_reason is None:
        work.step([*(each for each in long if each.finish_reason is None), short])
        steps += 1
    assert steps == 3  # a token in each
    assert work.stats.prefilled_tokens <= 2 * 1024 + 20 + 2 * 64  # of 7,220
    for _ in range(300):
        live = [each for each in long if each.finish_reason is None]
        if not live:
            break
        work.step(live)
    assert not live


def test_the_oldest_of_the_long_prompts_is_never_kept_waiting() -> None:
    work = long_work()
    oldest, talker = stranger(0, prompt(0, 900), new=1), stranger(1, prompt(1, 5), new=400)
    assert work.admit(oldest)
    assert work.admit(talker)
    live = [oldest, talker]
    for serial in range(2, 200):  # in every step another one comes, of which less was read
        newcomer = stranger(serial, prompt(serial, 300), new=1)
        if work.admit(newcomer):
            live.append(newcomer)
        work.step(live)
        live = [each for each in live if each.finish_reason is None]
        if oldest.finish_reason is not None:
            break
    assert serial <= 2 + 900 // 32 + 1


def test_members_of_a_group_are_read_whole() -> None:
    work = long_work()
    run(work, *(turn(member, prompt(member, 200)) for member in range(4)))
    assert work.stats.prefills == 1
