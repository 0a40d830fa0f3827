"""Writing files so that a reader sees the old one or the new one, whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullrank._errors import SettingError

__all__ = ["empty_folder", "refuse_unwritable", "weights_as_files", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Writes ``text`` beside ``path`` and renames it into place: a reader sees the old file or the new one, whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


@contextmanager
def weights_as_files() -> Iterator[None]:
    """Lets the reading and writing of weights fail as that of other files does.

    A full disk or a cut file is a `SafetensorError` there, which is no `OSError`.

    Raises:
        OSError: in the place of a `SafetensorError`.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"weights cannot be read or written: {error}") from error


def empty_folder(path: str | os.PathLike[str]) -> Path:
    """Returns where a folder is that is new or empty, links followed.

    Raises:
        SettingError: it is neither, or cannot be read.
    """
    try:
        folder = Path(path).expanduser().resolve()
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except (OSError, RuntimeError) as error:  # a ring of links, a folder that may not be read
        raise SettingError(f"{path}: cannot be written to: {error}") from error
    if taken:
        raise SettingError(f"{path}: exists already; name a new or empty folder")
    return folder


def refuse_unwritable(path: Path) -> None:
    """Raises `SettingError` where a file cannot be written, before anything is spent."""
    if path.is_dir():
        raise SettingError(f"{path} is a folder; give the name of a file")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "is a file" if not above.is_dir() else "may not be written to"
        raise SettingError(f"{path} cannot be written: {above} {why}")
