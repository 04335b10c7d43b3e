"""Where the parts meet: plain records and small protocols, one module per interface.

``openai``, ``router``, ``engine``, ``executor`` and ``transfer`` do not import one another; ``commands`` joins them.
"""
