"""``isthmus up FILE``: the rendered pods as local processes, for a laptop.

Called only by ``__main__``. Takes manifests from ``render`` and honours what a kubelet would: environment,
arguments, config maps, probes, restart policy, termination grace. It knows nothing about models or engines,
and it never talks to a cluster.
"""
