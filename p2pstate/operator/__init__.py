"""p2pstate-operator (extra ``operator``): Kubernetes pods for a Run, kept at their number. Runs recover without it.

decide.py decides, from values; reconcile.py reads, writes and acts; the rest translates. gone.py runs in the pods.
"""
