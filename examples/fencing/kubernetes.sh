#!/bin/sh
# p2prun --fence examples/fencing/kubernetes.sh: is a silent node gone? Node names are pod names (the host name in a pod).
# 0: gone: no such pod is left, or it was created after that node's agent started, or all its containers have ended.
# 1: not gone. 2: the API server cannot say. A pod on a host that is out of reach stays (Terminating) until the host is
# back or is deleted, so it counts as not gone; never delete one by force unless its host is off.
# The service account needs the verb "get" on pods.
pod=$(kubectl get pod "$1" --ignore-not-found \
    -o jsonpath='{.metadata.creationTimestamp} {.status.phase}') || exit 2
if [ -z "$pod" ]; then
    echo "there is no pod $1 any more"
    exit 0
fi
created=${pod%% *} phase=${pod##* }
created_s=$(date -d "$created" +%s 2>/dev/null) || exit 2
if [ "$created_s" -gt "$((P2PSTATE_FENCE_STARTED_US / 1000000))" ]; then
    echo "pod $1 was created at $created, after the agent had started"
    exit 0
fi
case $phase in
Succeeded | Failed) echo "pod $1 has ended: $phase"; exit 0 ;;
esac
echo "pod $1 is $phase"
exit 1
