"""How clients share what there is little of: turns, room and time. Whoever has most gives way, and nobody gets more by
asking more often. docs/bounds.md tells what is bounded so."""
