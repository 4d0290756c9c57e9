"""`python -m blackbox` is `blackbox`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. Without the server's packages, exits with the command that installs them."""
    try:
        from blackbox.cli import app
    except ModuleNotFoundError as error:
        # A missing module of blackbox itself is a fault, not a missing extra.
        if error.name is None or error.name.startswith("blackbox"):
            raise
        sys.exit(
            f"error: the command blackbox needs the package {error.name}, which is not installed; "
            "pip install '.[server]' in a checkout of blackbox"
        )
    app()


if __name__ == "__main__":
    main()
