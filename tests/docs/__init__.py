"""The reference pages: the parts of `docs/` that are generated from the code.

`make docs` writes them, and `tests/unit/test_docs.py` fails if a page differs from the output of the code.
"""
