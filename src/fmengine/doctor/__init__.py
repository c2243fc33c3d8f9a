"""Whether every component is here, imports and computes; each in a process of its own."""
