"""Copy of whole KV blocks inside one pool."""
