"""Make an environment with a patched torch under ``.venv/``.

    python tools/environment.py [RELEASE]

RELEASE is one of the files ``requirements/torch-RELEASE.txt``; without it, the newest
supported torch that pip finds is installed. Running it again is fast: packages are
installed only if what is asked for changed, and the overlay is brought up to date every
time.
"""

# Kept to what older Pythons can parse, so that they reach the message below.
import argparse
import hashlib
import subprocess
import sys
import venv
from pathlib import Path


if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        "This project needs Python 3.11 or newer, and {} is {}.{}. "
        "Name another one: make PYTHON=python3.12 ...".format(
            sys.executable, *sys.version_info[:2]
        )
    )

import tomllib


REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPOSITORY / "requirements"


def requirements_file(release: str) -> Path:
    """The file that pins a release; "default" stands for the range of all of them."""
    name = "torch.txt" if release == "default" else f"torch-{release}.txt"
    file = REQUIREMENTS / name
    if not file.is_file():
        known = sorted(f.stem.removeprefix("torch-") for f in REQUIREMENTS.glob("*-*"))
        sys.exit(f"TORCH={release} is not supported; choose one of {', '.join(known)}.")
    return file


def make_environment(release: str) -> Path:
    """Create or update ``.venv/RELEASE``; return its interpreter."""
    torch = requirements_file(release)
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    packages = settings["dependency-groups"]["dev"]
    folder = REPOSITORY / ".venv" / release
    python = folder / (
        "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    )
    asked = "\n".join([sys.version, torch.read_text("utf-8"), *packages])
    digest = hashlib.sha256(asked.encode()).hexdigest()
    stamp = folder / "installed"
    if python.exists() and stamp.exists() and stamp.read_text("utf-8") == digest:
        return python
    print(f"Setting up {folder}: {torch.read_text('utf-8').splitlines()[-1]}")
    venv.create(folder, with_pip=True, clear=not python.exists())
    install: list[str | Path] = [python, "-m", "pip", "install", "-r", torch, *packages]
    if subprocess.run(install, stdout=sys.stderr).returncode != 0:
        sys.exit(
            f"pip could not set up {folder} (its message is above). If this release "
            "has no wheel for your Python or platform, or a constraint forbids it, "
            "choose another one: make TORCH=2.13.0 ..."
        )
    stamp.write_text(digest, "utf-8")
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", nargs="?", default="default", metavar="RELEASE")
    options = parser.parse_args()
    python = make_environment(options.release)
    overlay: list[str | Path] = [python, REPOSITORY / "tools" / "overlay.py", "apply"]
    sys.exit(subprocess.run(overlay).returncode)


if __name__ == "__main__":
    main()
