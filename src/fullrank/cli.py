"""The command line: thin doors to the library.

Exit codes: 0 fine, 1 the answer is "no" (nothing beat the base model, a check found errors, a gate failed), 2 wrong
input, 3 a fault of fullrank itself.
"""

import sys
import traceback

import typer

from fullrank import (  # each registers its doors
    cli_choose,  # noqa: F401
    cli_golden,  # noqa: F401
    cli_measure,  # noqa: F401
    cli_mine,  # noqa: F401
    cli_report,  # noqa: F401
    cli_results,  # noqa: F401
)
from fullrank._errors import FullrankError
from fullrank.doors import app

__all__ = ["app", "main"]


def main() -> None:
    """Runs the command line; an error of ours is one message and exit code 2."""
    try:
        app()
    except (FullrankError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(3)  # a fault of ours is no "no"
