"""Writing files so that a reader sees the old one or the new one, whole."""

import os
from pathlib import Path

from fullrank._errors import SettingError

__all__ = ["refuse_unwritable", "write_atomically"]


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


def refuse_unwritable(path: Path) -> None:
    """Raises `SettingError` where a file cannot be written, before anything is spent."""
    if path.is_dir():
        raise SettingError(f"{path} is a folder; give the name of a file")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "is a file" if not above.is_dir() else "may not be written to"
        raise SettingError(f"{path} cannot be written: {above} {why}")
