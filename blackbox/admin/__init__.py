"""Operations on a running blackbox, shared by the command line and HTTP: find, list, cancel, count."""
