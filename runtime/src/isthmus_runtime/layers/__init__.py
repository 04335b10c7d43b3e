"""Building blocks of the models: attention, linear, norms, rotary embedding, embedding.

Called by ``models``. Each layer chooses its kernel through ``isthmus_kernels.dispatch``, the one place where
hardware differences live. No request state, no global context: what a layer needs is an argument.
"""
