"""From the description of a call to its result: which backend runs, and how a call splits into parts."""
