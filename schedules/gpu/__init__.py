"""Schedules for GPUs: one source for every device family, shaped by the profile."""
