"""Pure rendering: a validated spec in, Kubernetes manifests as plain dicts out.

Called by ``plan``, by ``isthmus render`` and by ``local``. The same spec always gives
the same bytes, compared with golden files. No client, no clock, no randomness, no reading of live objects.
"""
