"""What the log of a service leaves out."""

from __future__ import annotations

import logging

from blackbox.support.logs import MOST_TEXTS, REPEAT_S, OncePerMinute


def passes(once: OncePerMinute, text: str, at_s: float) -> bool:
    record = logging.LogRecord("blackbox.kafka", logging.WARNING, "", 0, text, None, None)
    record.created = at_s
    return bool(once.filter(record))


def test_the_same_text_of_several_kafka_clients_is_logged_once_a_minute() -> None:
    once = OncePerMinute()

    assert passes(once, "[thrd:1]: broker down (after 3ms in state UP)", 1000.0)
    assert not passes(once, "[thrd:2]: broker down (after 9ms in state UP)", 1000.0 + REPEAT_S - 1)
    assert passes(once, "[thrd:2]: broker down", 1000.0 + REPEAT_S)


def test_texts_that_never_come_again_do_not_fill_the_memory() -> None:
    once = OncePerMinute()
    for number in range(3 * MOST_TEXTS):
        assert passes(once, f"[thrd:1]: request {number} timed out", 1000.0)

    assert len(once._said) <= MOST_TEXTS
