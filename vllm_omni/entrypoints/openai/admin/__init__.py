"""Operators' routes: what each replica is at, and draining or restarting one."""
