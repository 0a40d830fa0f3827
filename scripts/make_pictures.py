"""Make the pictures of the README from the folder of a real run.

    fullrank demo --out runs/demo
    python scripts/make_pictures.py runs/demo docs

Writes ``docs/curves.svg``, the figure of the report page, and ``docs/page.png``, the page without it in a browser
(needs Chromium; without one the second is left out).
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fullrank import figures
from fullrank.page import write_report
from fullrank.runfolder import read_run_folder

COLOURS = {"ink": "#1b1f24", "muted": "#5b6570", "grid": "#dfe3e8", "main": "#1f6fd6", "base": "#8a6d1d"}
COLOURS |= {"good": "#1b7f46", "bad": "#c0332b", "extra": "#7a4fc0"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
WIDTH, HEIGHT = 1000, 1120


def curves(folder: Path, target: Path) -> None:
    """Draws the curves on white: a picture that stands alone knows no style of a page."""
    run = read_run_folder(folder)
    svg = figures.curve_figure(
        run.history, label=run.label, intervals=run.intervals, curves=run.curves, best_step=run.best_step
    )
    for name, colour in COLOURS.items():
        svg = svg.replace(f"var(--{name})", colour)
    head, rest = svg.split(">", 1)
    target.write_text(f'{head} font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>{rest}\n')


def page(folder: Path, target: Path) -> bool:
    """Takes a picture of the report page without its curves; returns False where there is no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return False
    with tempfile.TemporaryDirectory() as temporary:
        html = write_report(folder, Path(temporary) / "report.html")
        html.write_text(html.read_text().replace("</style>", "#curves { display: none }</style>", 1))
        options = [f"--user-data-dir={temporary}/profile", f"--window-size={WIDTH},{HEIGHT}", "--hide-scrollbars"]
        subprocess.run(
            [browser, *FLAGS, *options, f"--screenshot={target.resolve()}", html.resolve().as_uri()],
            check=True,
            capture_output=True,
            timeout=120,
        )
    return True


def main() -> None:
    """Writes both pictures."""
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/make_pictures.py RUN_FOLDER OUT_FOLDER")
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    curves(folder, out / "curves.svg")
    print(out / "curves.svg")
    print(out / "page.png" if page(folder, out / "page.png") else "page.png left out: no Chromium found")


if __name__ == "__main__":
    main()
