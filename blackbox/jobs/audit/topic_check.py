"""Whether the topics that an audit compares exist."""

from __future__ import annotations

from blackbox.config.settings import Settings
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.topics import Topics, receipts_topic
from blackbox.spark.job_failures import AuditError
from blackbox.spark.journals import Reach, of_table


def check_topics(there: Reach, settings: Settings, access: KafkaAccess) -> None:
    """Raise AuditError if only some of the request topics exist, or one has records but no receipts topic."""
    servers = settings.kafka_bootstrap_servers
    found = {journal.shard.topic for journal in there}
    missing = [topic for topic in settings.topics if topic not in found]
    # Without any, nothing was ever requested.
    if missing and found:
        raise AuditError(
            f"the request topic {missing[0]} does not exist on {servers}, so its requests cannot be "
            "judged; `blackbox run` creates missing topics; if it was deleted, `blackbox rebind` then "
            "settles what was pending, or take it out of BLACKBOX_REQUEST_TOPICS"
        )
    spans = of_table(there, "requests").items()
    written = sorted({shard.topic for shard, span in spans if span.end > span.start})
    receipts = Topics(access.admin()).partitions([*map(receipts_topic, written)], to="Read")
    lacking = [topic for topic in written if receipts_topic(topic) not in receipts]
    # Every request that has ended would count as lost.
    if lacking:
        raise AuditError(
            f"the topic {receipts_topic(lacking[0])} does not exist on {servers}, so nothing shows which "
            f"requests of {lacking[0]} have ended; `blackbox run` creates it; if it was deleted, "
            "`blackbox rebind` then keeps what is pending in Redis"
        )
