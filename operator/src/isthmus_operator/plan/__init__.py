"""Pure deciding: what was seen of a service, and its spec, to what should be done next and what is to be told.

``observe`` reads objects into records, ``planner`` and ``rollout`` decide counts, ``desired`` renders them, ``status``
and ``events`` say how it stands. Time is an argument. No client, no kopf, no event loop.
"""
