"""Jobs on Spark: audit, ledger, load, promote."""
