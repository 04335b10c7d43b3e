"""The serving runtime: router and engine of an Isthmus service, one process per role.

Entered through ``__main__`` (the command ``isthmus-runtime``); ``commands`` joins the parts.
``openai``, ``router``, ``engine``, ``executor`` and ``transfer`` do not import each other: they meet in
``interfaces``. The router runs without torch. Environment variables are read in ``config`` alone.
"""
