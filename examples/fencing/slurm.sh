#!/bin/sh
# p2prun --fence examples/fencing/slurm.sh: is a silent node gone? Node names are Slurm's (p2prun's default, the host name).
# 0: gone: the host is powered down, or was booted after that node's agent started. 1: not known to be gone. 2: Slurm
# cannot say. "Not responding" is no answer: a host that the controller cannot reach may still be training.
node=$(scontrol --oneliner show node "$1") || exit 2
case $node in
*POWERED_DOWN*) echo "$1 is powered down"; exit 0 ;;
esac
booted=$(printf '%s\n' "$node" | sed -n 's/.*BootTime=\([^ ]*\).*/\1/p')
booted_s=$(date -d "$booted" +%s 2>/dev/null) || { echo "Slurm does not know when $1 was booted"; exit 2; }
if [ "$booted_s" -gt "$((P2PSTATE_FENCE_STARTED_US / 1000000))" ]; then
    echo "$1 was booted at $booted, after its agent had started"
    exit 0
fi
echo "$1 is up since $booted, or does not answer Slurm"
exit 1
