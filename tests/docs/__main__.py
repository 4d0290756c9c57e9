"""`python -m tests.docs` writes the generated parts of the pages."""

from __future__ import annotations

from tests.docs.pages import generated_pages, rewritten

for page in generated_pages():
    before = page.read_text()
    after = rewritten(before)
    if after != before:
        page.write_text(after)
        print(f"wrote docs/{page.name}")
