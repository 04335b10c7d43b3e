"""The commands behind ``isthmus-runtime``: each joins the parts for one of them. Only ``__main__`` imports them."""
