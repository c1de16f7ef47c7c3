"""Steps become chunks: which sequence writes where, and who closes the channel."""

from __future__ import annotations

from dataclasses import replace

from steppe.request import FinishReason, LLMGenerationRequest, Usage
from steppe.runtime.boundary import SessionStep
from steppe.runtime.delivery import BlockingDelivery
from steppe.stepping.types import BatchResult, ResidentRef, SlotSeed, TokenDelta
from steppe.streaming import StreamChannel
from tests.runtime.asking import ask, heard
from tests.runtime.test_sequence import seed_of

REF = ResidentRef(0, 1)


def seed(index: int, channel: StreamChannel | None, sequence_index: int = 0) -> SlotSeed:
    return replace(
        seed_of(), original_index=index, stream_channel=channel, sequence_index=sequence_index
    )


def result(index: int, tokens: bytes, reason: FinishReason = FinishReason.LENGTH) -> BatchResult:
    return BatchResult(1, index, tuple(tokens), tokens.decode(), reason, "why", prompt_tokens=4)


def delta(tokens: bytes) -> TokenDelta:
    return TokenDelta(tuple(tokens), tokens.decode())


def test_the_last_delta_and_the_end_are_one_chunk() -> None:
    channel = StreamChannel()
    delivery = BlockingDelivery([ask(channel=channel)])
    one = seed(0, channel)
    delivery.step(SessionStep(deltas=((REF, one, delta(b"ab")),)))
    first = channel.try_pop()
    assert first is not None
    assert (first.token_ids, first.text, first.finished) == (tuple(b"ab"), "ab", False)
    delivery.step(
        SessionStep(deltas=((REF, one, delta(b"c")),), finished=((REF, one, result(0, b"abc")),))
    )
    last = channel.try_pop()
    assert last is not None
    assert (last.token_ids, last.finished) == (tuple(b"c"), True)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, "why")
    assert last.usage == Usage(4, 3, 0)
    assert channel.finished
    assert channel.try_pop() is None


def test_an_end_without_a_delta_is_a_chunk_too() -> None:
    channel = StreamChannel()
    delivery = BlockingDelivery([ask(channel=channel)])
    ended = (ResidentRef(), seed(0, channel), result(0, b"", FinishReason.CANCELLED))
    delivery.step(SessionStep(finished=(ended,)))
    assert heard(channel)[0].finish_reason is FinishReason.CANCELLED
    assert channel.finished


def test_sequences_of_one_request_share_a_channel_and_the_last_closes_it() -> None:
    channel = StreamChannel()
    delivery = BlockingDelivery(ask(n=2, seed=1, channel=channel).sequences())
    assert delivery.channels == (channel,)
    seeds = [seed(index, channel, index) for index in range(2)]
    delivery.step(
        SessionStep(
            deltas=tuple((REF, one, delta(b"a")) for one in seeds),
            finished=((REF, seeds[1], result(1, b"a")),),
        )
    )
    assert not channel.finished
    delivery.step(SessionStep(finished=((REF, seeds[0], result(0, b"ab")),)))
    assert channel.finished
    said = heard(channel)
    assert (said[1].usage, said[0].usage) == (None, Usage(4, 3, 0))


def test_members_of_a_batch_write_apart_and_some_nowhere() -> None:
    channels = [StreamChannel(), None, StreamChannel()]
    batch = LLMGenerationRequest.batch([ask(channel=channel) for channel in channels])
    delivery = BlockingDelivery(batch.sequences())
    assert delivery.channels == (channels[0], channels[2])
    seeds = [seed(index, channel) for index, channel in enumerate(channels)]
    delivery.step(
        SessionStep(
            deltas=tuple((REF, one, delta(bytes([97 + index]))) for index, one in enumerate(seeds)),
            finished=((REF, seeds[2], result(2, b"c")),),
        )
    )
    first, _, third = channels
    assert first is not None
    assert third is not None
    assert heard(first)[0].text == "a"
    assert heard(third)[0].text == "c"
    assert (first.finished, third.finished) == (False, True)


def test_a_joiner_closes_its_own_channel() -> None:
    channel = StreamChannel()
    delivery = BlockingDelivery([ask()])
    joiner = seed(1, channel)
    delivery.step(SessionStep(finished=((REF, joiner, result(1, b"j")),)))
    assert channel.finished
    assert heard(channel)[0].usage == Usage(4, 1, 0)
