"""Makes the virtual environment that the Makefile works in: `PYTHON tools/venv.py .venv`.

In: the interpreter that runs this file; pyproject.toml and constraints.txt. Out: a directory whose interpreter has
p2pstate (editable), its dependencies and its development tools, and in it a file `ready`, written last. An interpreter
that already has a suitable torch lends it (a line in a .pth file); otherwise torch is installed, pinned. Every refusal
is one sentence and exit code 1. The syntax here stays old, so that an old Python gets its sentence too.

`PYTHON tools/venv.py .venv trainers` adds the trainers and trackers of other projects to one that is ready, with the
versions of constraints-trainers.txt, and writes a file `trainers`.
"""

import importlib.util
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 10)
TORCH_PART = "# torch and what it needs"  # the line of constraints.txt below which pins belong to torch


def refuse(sentence):
    sys.exit("p2pstate: " + sentence)


def check_platform():
    if not sys.platform.startswith("linux"):
        refuse(f"needs Linux (memfd, /proc, PDEATHSIG); this is {sys.platform}.")
    if sys.version_info < MIN_PYTHON:
        refuse(
            f"needs Python 3.11 or newer, {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}; "
            "name another: make demo PYTHON=python3.12"
        )
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            refuse(
                f"{sys.executable} cannot make virtual environments (no module {module}); "
                "on Debian and Ubuntu: apt-get install python3-venv"
            )


def suitable_torch():
    """The directory of an installed torch that is new enough and imports, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    probe = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    found = subprocess.run(probe, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    match = re.match(r"(\d+)\.(\d+)", found.stdout)
    if found.returncode != 0 or match is None or (int(match.group(1)), int(match.group(2))) < MIN_TORCH:
        return None
    return os.path.dirname(os.path.dirname(spec.origin))


def constraints_without_torch(target):
    """Pins of what the lent torch needs would fight with what it was installed with: leave those out."""
    path = os.path.join(target, "constraints.txt")
    with open(os.path.join(ROOT, "constraints.txt")) as source, open(path, "w") as out:
        out.write(source.read().split(TORCH_PART)[0])
    return path


def lend(torch_dir, python):
    """Let `python` find torch, and whatever lies beside it and was not installed here before, in `torch_dir`."""
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = subprocess.check_output(where, text=True).strip()
    with open(os.path.join(site_packages, "lent_torch.pth"), "w") as out:
        out.write(torch_dir + "\n")


def run(*command):
    if subprocess.call(command, cwd=ROOT) != 0:
        refuse("this failed, see above: " + " ".join(command))


def add_trainers(target):
    constraints = os.path.join(target, "constraints.txt")  # there is one where torch is lent
    if not os.path.exists(constraints):
        constraints = os.path.join(ROOT, "constraints.txt")
    pip = [os.path.join(target, "bin", "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    more = os.path.join(ROOT, "constraints-trainers.txt")
    run(*pip, "-c", constraints, "-c", more, "-e", ".[huggingface,lightning,mlflow,tensorboard]")
    # torchtitan alone needs a hundred megabytes for its models; its loop needs these
    run(*pip, "--no-deps", "-c", more, "torchtitan", "torchdata", "tyro", "docstring_parser", "typeguard", "spmd_types")
    open(os.path.join(target, "trainers"), "w").close()


def main():
    check_platform()
    target = os.path.abspath(sys.argv[1])
    if sys.argv[2:] == ["trainers"]:
        add_trainers(target)
        return
    torch_dir = suitable_torch()
    run(sys.executable, "-m", "venv", "--clear", target)
    python = os.path.join(target, "bin", "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = os.path.join(ROOT, "constraints.txt")
    if torch_dir is not None:
        print(f"p2pstate: using the torch in {torch_dir}")
        constraints = constraints_without_torch(target)
        run(*pip, "-r", constraints)  # before lending, or pip would not make the commands of what it finds there
        lend(torch_dir, python)
    run(*pip, "-c", constraints, "-e", ".[dev]")
    run(python, "-c", "import torch, numpy, zmq, msgpack, xxhash, psutil")
    open(os.path.join(target, "ready"), "w").close()


if __name__ == "__main__":
    main()
