"""The router: chooses a prefill and a decode pod for each request and streams the answer through.

Built by ``commands``. ``policy`` is pure (loads and prefix hashes in, a pair and a reason out), ``pool`` knows the
live pods, ``proxy`` carries the requests. Needs no Kubernetes rights and no torch.
"""
