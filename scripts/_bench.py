"""What the benchmarks share: where a result comes from, and where it goes."""

import json
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_report(name, report):
    """Writes ``results/NAME.json`` with the machine and the commit, and prints it."""
    commit = ["git", "rev-parse", "--short", "HEAD"]
    report = {
        **report,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "commit": subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip(),
    }
    text = json.dumps(report, indent=2)
    path = ROOT / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")
    print(text)
