#!/usr/bin/env bash
# Builds the wheel, installs it into an environment outside the checkout, and from there trains on two nodes of one worker
# each, once with a worker killed in the middle of a backward pass and once without: both must end with the same bits.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT

"$python" -m build --wheel --outdir "$work/dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" -m venv "$work/venv"
bin=$work/venv/bin
# The development environment lends torch and the rest; its p2pstate is only a link to the checkout, which this omits.
"$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
    >"$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
"$bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$work"/dist/*.whl
cp -r "$root/examples" "$work/examples"
cd "$work"

"$bin/python" - "$work" <<'PYTHON'
import sys
from pathlib import Path

import p2pstate
import rendezvous

for package in (p2pstate, rendezvous):
    folder = Path(package.__file__).parent
    assert folder.is_relative_to(sys.argv[1]), f"{package.__name__} comes from {folder}, not from the wheel"
    assert (folder / "py.typed").exists(), f"{package.__name__} lacks py.typed in the wheel"
PYTHON

"$bin/p2pstate" doctor >doctor.log 2>doctor.err && [[ ! -s doctor.err ]] || { cat doctor.log doctor.err; exit 1; }

train() { # train FOLDER [arguments of train_gpt.py]: two nodes with the ends of their logs on failure
    local folder=$work/$1 ports agents=()
    shift
    mkdir "$folder"
    ports=($("$bin/python" -c 'import ports; print(*ports.free_ports(2))'))
    for index in 0 1; do
        OMP_NUM_THREADS=1 timeout --kill-after=5 180 "$bin/p2prun" \
            --nnodes 2 --nproc-per-node 1 --contacts "127.0.0.1:${ports[0]},127.0.0.1:${ports[1]}" \
            --bind "127.0.0.1:${ports[index]}" --name "node$index" --run-id wheel --run-dir "$folder" --quiet \
            examples/train_gpt.py --steps 8 --num-layers 2 --width 64 --context 32 --batch 2 --out "$folder" "$@" \
            >"$folder/agent$index.log" 2>&1 &
        agents+=($!)
    done
    for agent in "${agents[@]}"; do
        wait "$agent" || { tail -n 30 "$folder"/*.log "$folder"/logs/*/*.log; return 1; }
    done
}
export PYTHONPATH=$work/examples
train faulted --kill 5:1:backward
train undisturbed

"$bin/python" - <<'PYTHON'
import sys
from pathlib import Path

from outcome import compare

compared = compare(Path("faulted"), Path("undisturbed"), num_ranks=2)
killed = Path("faulted/killed-5-1-backward").exists()
print(f"from the wheel: {compared.num_tensors} tensors and {compared.num_batches} batches compared, killed: {killed}")
sys.exit("\n".join(compared.differences) or (0 if killed and compared.identical else "the comparison was empty"))
PYTHON
echo "from the wheel: identical after a killed worker"

# The wheel's entry points: an unchanged script under stock torchrun gets its store from the node's agent.
cat >unchanged.py <<'PYTHON'
import torch
import torch.distributed as dist


def refuse(*args, **kwargs):
    raise SystemExit("a TCPStore was made")


dist.TCPStore.__init__ = refuse
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2, total
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 timeout --kill-after=5 120 "$bin/python" -m torch.distributed.run --rdzv-backend=p2p --rdzv-id wheel \
    --nnodes 1 --nproc-per-node 2 unchanged.py >torchrun.log 2>&1 || { tail -n 30 torchrun.log; exit 1; }
echo "from the wheel: torchrun --rdzv-backend=p2p runs an unchanged script"
