"""Loads on a server: the requests of a perf_analyzer data file, sent at a concurrency or a rate, and what they took."""
