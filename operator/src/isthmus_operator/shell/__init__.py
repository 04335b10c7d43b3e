"""Everything that touches a cluster: watches, queue, lease, API client, webhook, metrics.

Entered through ``handlers.run``. ``controller`` is one reconcile, ``apply`` its writes; what they decide is ``plan``'s.
"""
