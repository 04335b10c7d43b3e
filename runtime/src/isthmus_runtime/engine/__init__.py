"""The engine of one pod: schedules requests step by step and answers the router over HTTP.

Started by ``commands``. ``scheduler`` decides and is pure; ``loop`` asks it, hands the plan to an Executor and
applies the result; ``backend`` and ``server`` face outwards. Executors and transfers are known only through
``interfaces``: no import of ``executor``, ``transfer``, ``openai`` or ``router`` here.
"""
