"""Partitions of the request topics that no member of the consumer group owns, though the group is stable."""

from __future__ import annotations

from typing import cast

from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription

from blackbox.journal.kafka_access import KafkaAccess, logger, outcome
from blackbox.journal.topics import Topics
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard

LOOK_S = 10  # between two looks; a new partition normally has an owner sooner

# An hour: joining again does not help if, for example, the group's leader may not see a topic.
MOST_LOOKS = 360


class UnownedPartitions:
    """Tells one member of the group to join it again when partitions stay without an owner.

    A member with an instance id that comes back within the session timeout gets the assignment of its
    predecessor, and the group is not rebalanced. Partitions and topics that were added while it was away
    are in its first metadata, so no member notices a change either.
    """

    def __init__(self, access: KafkaAccess, topics: list[str]) -> None:
        self._access = access
        self._topics = topics
        self._admin: AdminClient | None = None
        self._looks = 0
        self._looks_until_rejoin = 2

    def must_rejoin(self, member_id: str) -> bool:
        """Look, and return whether this member is to leave the group and to join it again."""
        try:
            unowned, members = self._look()
        except (RecoveryRequired, KafkaException):  # the owners of shards report this
            self._admin = None  # it may have lost sight of all brokers
            return False
        if not unowned:
            self._looks, self._looks_until_rejoin = 0, 2
            return False
        self._looks += 1
        # One member is enough: it is the one with the lowest id, so that not all leave at once.
        if self._looks < self._looks_until_rejoin or member_id != min(members, default=member_id):
            return False
        logger.warning(
            "membership: no member of the group %s owns %s; rejoining it",
            self._access.group_id, ", ".join(map(str, sorted(unowned))),
        )  # fmt: skip
        # If it does not help, the next time comes after twice as many looks.
        self._looks, self._looks_until_rejoin = 0, min(2 * self._looks_until_rejoin, MOST_LOOKS)
        return True

    def has_others(self, instance_id: str | None) -> bool:
        """Whether members that do not have this instance id own partitions, or are about to."""
        try:
            group = self._group()
        except KafkaException:
            self._admin = None
            return False
        others = [
            one
            for one in group.members
            if instance_id is None or one.group_instance_id != instance_id
        ]
        # during a rebalance, the broker does not tell what they own
        is_settled = group.state == ConsumerGroupState.STABLE
        return any(one.assignment.topic_partitions or not is_settled for one in others)

    def _group(self) -> ConsumerGroupDescription:
        if self._admin is None:
            self._admin = self._access.admin()
        [asked] = self._admin.describe_consumer_groups([self._access.group_id]).values()
        return cast("ConsumerGroupDescription", outcome(asked))

    def _look(self) -> tuple[set[Shard], list[str]]:
        """The partitions without an owner, and the ids of the members that own others; none during a rebalance."""
        group = self._group()
        if group.state != ConsumerGroupState.STABLE:
            return set(), []
        assert self._admin is not None
        counts = Topics(self._admin).partitions(self._topics)
        every = {Shard(topic, p) for topic, count in counts.items() for p in range(count)}
        owned = {
            one.member_id: {Shard(at.topic, at.partition) for at in one.assignment.topic_partitions}
            for one in group.members
        }
        return every.difference(*owned.values()), [id for id in owned if owned[id] & every]
