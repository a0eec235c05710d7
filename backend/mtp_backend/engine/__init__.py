"""The engine: sequences, scheduling, the speculative step, and the offline API."""
