"""Optional packages: imported where they are used, with the install command in the error."""

from importlib import import_module
from types import ModuleType

from fullrank._errors import MissingExtraError

__all__ = ["require"]


def require(module: str, *, extra: str) -> ModuleType:
    """Returns the imported ``module``.

    Raises:
        MissingExtraError: it is not installed; the message names the extra that brings it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise MissingExtraError(
            f"{module!r} is needed for this and is not installed. Install it with: pip install 'fullrank[{extra}]'"
        ) from error
