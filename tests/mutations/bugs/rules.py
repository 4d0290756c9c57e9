"""Bugs in `blackbox/rules`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "quotas-of-the-earlier-topic",
        "The service does not notice, when it counts quotas, that a request topic was created again.",
        (
            Change(
                "rules/admission.py",
                "        return self.topic_id == topic_id and not is_later\n",
                "        return not is_later\n",
            ),
        ),
        (),
        ("tests/unit/test_admission.py",),
    ),
    Bug(
        "pieces-counted-again",
        "A batch that is stored again in pieces is counted again in the quotas of its callers.",
        (
            Change(
                "rules/admission.py",
                "        is_later = epoch > self.epoch != UNKNOWN_EPOCH\n",
                "        is_later = epoch != self.epoch != UNKNOWN_EPOCH\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rules.py"
            "::test_a_batch_that_is_stored_again_in_pieces_is_not_counted_again",
        ),
    ),
    Bug(
        "quotas-of-a-lost-end",
        "The service does not notice, when it counts quotas, that other requests took the offsets of lost ones.",
        (
            Change(
                "rules/admission.py",
                "        return self.topic_id == topic_id and not is_later\n",
                "        return self.topic_id == topic_id\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rules.py"
            "::test_quotas_apply_to_requests_that_took_the_offsets_of_lost_ones",
        ),
    ),
    Bug(
        "rates-of-another-cluster",
        "Deployments on two clusters that share a Redis share the rates of targets with the same name.",
        (
            Change(
                "rules/target_rates.py",
                'Second("messages", f"{cluster}/{to}", now_ms // 1000)',
                'Second("messages", to, now_ms // 1000)',
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "a-used-up-second-is-counted",
        "In the rest of a second in which the rates of targets are used up, Redis is asked about them at each check.",
        (
            Change(
                "rules/target_rates.py",
                "known[at] < limited.get(to, math.inf)",
                "to in limited",
            ),
        ),
        (),
        (
            "tests/unit/test_target_rates.py::test_redis_is_not_asked_about_a_second_that_is_used_up",
        ),
    ),
    Bug(
        "a-silent-redis-is-asked-at-once",
        "While Redis cannot count the messages to targets with a rate, all shards wait for it at each check.",
        (
            Change(
                "rules/target_rates.py",
                "            if not more or now_s < self._ask_at_s:\n",
                "            if not more:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_target_rates.py::test_a_redis_that_does_not_answer_is_asked_again_after_a_while_by_one_shard",
        ),
    ),
    Bug(
        "rates-only-with-redis",
        "While Redis cannot count, targets with a rate get all messages at once.",
        (
            Change(
                "rules/target_rates.py",
                "        before = known if before is None else before\n",
                "        before = 0 if before is None else before\n",
            ),
        ),
        (),
        (
            "tests/unit/test_target_rates.py::test_while_redis_cannot_count_a_process_keeps_to_the_rate_by_itself",
        ),
    ),
    Bug(
        "large-headers-are-no-message",
        "A caller's limit on the size of messages does not count their keys and headers.",
        (
            Change(
                "rules/rules.py",
                "    return names + sum(len(value) for value in values if value is not None)\n",
                '    return len(request.message or b"")\n',
            ),
        ),
        (),
        ("tests/unit/test_rules.py::test_a_refusal_names_the_value_and_the_rule",),
    ),
    Bug(
        "every-caller-waits-for-redis",
        "A Redis that hangs delays intake by seconds for each caller that has a quota, and logs a line for each.",
        (Change("rules/admission.py", "if time.monotonic() < self._ask_at_s:", "if False:"),),
        (),
        ("tests/unit/test_admission.py",),
    ),
)
