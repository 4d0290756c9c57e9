"""The programs that run in the environments of the peers: jobs, workers, and clients that schedule."""
