"""The ledger: both journals as Parquet tables, further back than Kafka keeps them."""
