"""Pure decisions: from what was seen of a service, and its spec, to what to do next and what to report.

``observe`` reads objects into records, ``planner`` and ``rollout`` decide counts, ``desired`` renders them, ``status``
and ``events`` report its state. Time is an argument. No client, no kopf, no event loop.
"""
